"""What leads a decode, token by token: a list of answers, a grammar, a constraint of your own; and thoughts before
them."""
