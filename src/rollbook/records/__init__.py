"""The files of a run: one module per file, its record, writer and reader together."""
