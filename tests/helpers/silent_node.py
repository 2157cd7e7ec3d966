"""A `flower-supernode` that announces its reports and never uploads them."""

import sys

import flwr.supernode.start_client_internal as supernode
from flwr.supernode.cli.flower_supernode import flower_supernode

SMALL = 5000
"""Bytes; what is smaller, as the answer which client it is, is uploaded."""
upload = supernode.push_object_contents_from_iterable


def keep_to_oneself(contents, *arguments, **options):
    contents = list(contents)
    if sum(len(content) for _, content in contents) < SMALL:
        upload(contents, *arguments, **options)


supernode.push_object_contents_from_iterable = keep_to_oneself
sys.argv[0] = "flower-supernode"
sys.exit(flower_supernode())
