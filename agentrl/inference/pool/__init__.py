"""The pool of servers: calls go to healthy members, and weight updates reach all of them."""
