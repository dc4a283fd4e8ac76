"""What commands share on the terminal: options, waiting, errors as lines."""
