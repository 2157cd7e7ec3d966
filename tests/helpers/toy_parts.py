"""Parts of the command that tries everything, which the tests of it run."""


def sound(count, seed):
    return count, count, [], {"ms": float(seed)}


def one_in_three(count, seed):
    failures = [f"number {number}" for number in range(seed, seed + count) if number % 3 == 0]
    return count, count - len(failures), failures


def broken(count, seed):
    raise RuntimeError("it cannot begin")
