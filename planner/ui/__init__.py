"""`plan ui`: the search in a browser on this machine.

server    a small HTTP server on the loopback address, with a token in the address
jobs      searches that run while a page looks at them
content   what a page shows of a plan, as JSON
assets    the page itself
"""

from planner.ui.server import Server, serve

__all__ = ["Server", "serve"]
