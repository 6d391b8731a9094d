"""``python -m bestresponse`` is the command ``bestresponse``."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
