"""The learner: pure functions over arrays, and the one compiled step built from them.

``advantages`` rewards to advantages · ``losses`` per-token policy losses · ``kl`` estimators against the
reference · ``mismatch`` engine/trainer correction · ``reduce`` the only place where tokens become a scalar ·
``shaping`` length-dependent rewards · ``reference`` when the reference policy is reset · ``optim`` AdamW,
its schedule, skipped updates.

Alternatives of one kind sit in a plain dict (``LOSSES``, ``ADVANTAGES``, ...), fetched by name with that module's
``get`` or, where they take hyper-parameters, ``bind``.
"""
