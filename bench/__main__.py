"""``python -m bench``: the benchmark tables, one after the other."""

from .overhead import main

if __name__ == "__main__":
    main()
