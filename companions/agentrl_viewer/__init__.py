"""The viewer: runs in the browser, as proofs, side by side, and in the formats of other programs."""
