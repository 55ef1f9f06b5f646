"""Who acts: anything that turns a conversation into the next message."""
