"""What a loss did, token by token: numbers over token exports, for the terminal and for programs."""
