"""What an episode is, and the one way to play it. Knows no files, no trainer and no command line."""
