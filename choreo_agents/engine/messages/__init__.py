"""Messages: what they are made of, who keeps them, and how calls read them."""
