"""SQL over the files of runs and collections, read in place."""
