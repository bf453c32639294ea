"""Lets `python -m hyper_parallel` be the command `hyper-parallel`."""

from hyper_parallel.cli import main

if __name__ == "__main__":
    main()
