"""``python -m hybridtf``."""

from hybridtf.cli import main

if __name__ == "__main__":
    main()
