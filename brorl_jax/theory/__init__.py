"""The one-step theory of rollout size [P sec. 2]: pure functions, no state.

``mass_balance`` where probability goes in one policy-gradient step, and what the never-sampled tokens do to it ·
``precision`` the same functions in float64 · ``simulator`` the paper's token-level experiment as one compiled scan.
"""
