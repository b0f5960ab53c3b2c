"""Properties of advantages, losses and corrections, for tests: `check_advantage`, `check_policy_loss`, `check_correction`.

Invariant: advantages are checked by exact enumeration, so "unbiased" means equal up to rounding, not up to noise.
"""
