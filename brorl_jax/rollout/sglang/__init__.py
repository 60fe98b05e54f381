"""Rollouts from stock SGLang servers: generation over HTTP, weights published to them, nothing trusted blindly.

``protocol`` builds requests and checks answers, ``client`` speaks HTTP, ``pool`` knows which servers may be used,
``generation`` gets groups out of them, ``weights`` and ``publish`` bring new weights to them, ``launch`` and ``guard``
run servers of our own, ``watch`` reads their counters, ``engine`` is the face that the training loop sees.
"""
