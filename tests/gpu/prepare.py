"""Compile the kernels of every case by many processes at once: `python prepare.py PART PARTS`. Results are discarded."""

import sys

from cases import CASES, SPREAD, check


def main(part: int, parts: int) -> None:
    for case in CASES[part::parts]:
        try:
            check(case, path="cp", world=SPREAD[case.name], device="cuda")
            check(case, path="tp", world=1, device="cuda")
        except Exception as error:  # the test itself reports it
            print(f"{case.name}: {type(error).__name__}", file=sys.stderr)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
