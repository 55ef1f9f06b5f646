"""`python -m rollbook` is `rollbook`."""

from rollbook.cli.main import main

if __name__ == "__main__":
    main()
