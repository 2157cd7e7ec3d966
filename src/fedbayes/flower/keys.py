"""Certificates and keys of a federation: a CA of its own, and a key for every client."""

import re
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedbayes.core.files import write_beside
from fedbayes.errors import EngineError, RunError, told_as, warn

_DAYS = 825
"""How long certificates hold; browsers and TLS libraries accept no more."""


def make_keys(folder: Path, hosts: list[str], clients: int) -> list[Path]:
    """Write a CA, a certificate for the SuperLink, and a pair of keys for every client.

    Args:
        folder: where to; private keys can be read by the owner alone.
        hosts: names and addresses by which nodes reach the SuperLink.
        clients: number of clients.

    Returns:
        The files: `ca.crt`, `ca.key`, `server.pem`, `server.key`, `client-I.key`,
        `client-I.pub`, and `superexec.key`, the secret of whoever may take a run.

    Raises:
        RunError: the folder is not empty or cannot be written, or a host is invalid.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(f"{folder} is not empty. Choose another folder, so that no key is lost")
    names = [_host(host) for host in hosts]
    files: dict[str, bytes] = {}
    ca_key, server_key = _new_key(), _new_key()
    ca_name = _name("fedbayes federation CA")
    ca = _certificate(ca_name, ca_key, ca_name, ca_key, hosts=None)
    server = _certificate(_name(hosts[0]), server_key, ca_name, ca_key, hosts=names)
    files["ca.crt"], files["ca.key"] = _pem(ca), _private(ca_key)
    files["server.pem"], files["server.key"] = _pem(server), _private(server_key)
    files["superexec.key"] = secrets.token_bytes(32)
    for client in range(clients):
        key = _new_key()
        files[f"client-{client}.key"] = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        )
        files[f"client-{client}.pub"] = key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
    with told_as(RunError, f"cannot write {folder}", OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, content in files.items():
            if name.endswith(".key"):
                (folder / name).touch(mode=0o600)
                (folder / name).write_bytes(content)
            else:
                write_beside(folder / name, content)
    return [folder / name for name in files]


def read_public_key(file: Path) -> bytes:
    """A client's public key as the SuperLink wants it. A RunError if the file holds none."""
    with told_as(
        RunError, f"cannot read the public key {file}", OSError, ValueError, UnsupportedAlgorithm
    ):
        key = serialization.load_ssh_public_key(file.expanduser().read_bytes())
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise RunError(
            f"{file} is not an elliptic curve key. Create it with `fedbayes federate keys`"
        )
    return key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def key_names(files: Sequence[Path], clients: Sequence[int]) -> dict[Path, str]:
    """Names to admit keys under; each ends with the client that its key is bound to.

    Args:
        files: the public keys.
        clients: which client each is of, in their order; empty where names of files say it.

    Raises:
        EngineError: there are not as many clients as files, or one is named twice.
    """
    if not clients:
        for file in files:
            if not re.fullmatch(r"client-\d+", file.stem):
                warn(
                    f"the file name of {file} has no client number, so the first number from its "
                    "node is used. Give it with --client NUMBER"
                )
        return {file: file.stem for file in files}
    if len(clients) != len(files) or len(set(clients)) < len(clients):
        raise EngineError(
            f"--client needs {len(files)} different numbers, one per key, in the order of the keys"
        )
    stems = [re.sub(r" *client-\d+$", "", file.stem) for file in files]
    names = [f"{stem} client-{c}".strip() for stem, c in zip(stems, clients, strict=True)]
    return dict(zip(files, names, strict=True))


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _certificate(
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    *,
    hosts: list[x509.GeneralName] | None,
) -> x509.Certificate:
    """A certificate for these hosts, or of a CA if there are none."""
    start = datetime.now(UTC) - timedelta(minutes=5)  # clocks differ
    authority = hosts is None
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=_DAYS))
        .add_extension(
            x509.BasicConstraints(ca=authority, path_length=0 if authority else None),
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
            critical=False,
        )
        .add_extension(_usage(authority), critical=True)
    )
    if hosts is not None:
        names = x509.SubjectAlternativeName(hosts)
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        builder = builder.add_extension(names, critical=False).add_extension(usage, critical=False)
    return builder.sign(issuer_key, hashes.SHA384())


def _usage(authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        pass
    try:
        if host:
            return x509.DNSName(host)
    except ValueError:
        pass
    raise RunError(
        f"--host {host!r} is not a valid name for a certificate. Write non-ASCII letters as xn--…"
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
