"""Tool calls as text: writes them in a model family's format, and parses streamed ones.

Read `grammar` (data types, and how a family writes calls), `reading` (the parser), `format` (calls and results as
turns).
"""
