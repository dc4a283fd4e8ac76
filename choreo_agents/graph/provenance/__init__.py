"""Who said what, as far as seals prove it.

Read `notes` (what stands on a message), `conversation` (what of it is proven), `notary` (which conversation a node is
in), then the three places where it is asked: `signing` (plain nodes), `door` (input), `proven` (an agent that reads).
"""
