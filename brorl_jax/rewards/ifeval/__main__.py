"""IFEval's four figures for responses that are there already::

    python -m brorl_jax.rewards.ifeval input_data.jsonl responses.jsonl

Both are JSON lines, as IFEval's: prompts have ``prompt``, ``instruction_id_list`` and ``kwargs``; responses have
``prompt`` and ``response``, one line for each. Several responses to a prompt all count.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from brorl_jax.commandline import piped
from brorl_jax.data.files import read_rows
from brorl_jax.errors import UserError
from brorl_jax.rewards.formats import FORMATS
from brorl_jax.rewards.ifeval.kinds import accuracies, judge


def figures(prompts: Sequence[Mapping[str, Any]], responses: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """``strict`` and ``loose``, each at ``prompt`` and ``instruction`` level: ``{"strict/prompt": ..., ...}``.

    Judged is what follows the reasoning; a response without any is judged as an empty one, which follows nothing.

    Raises:
        UserError: a response to no prompt, or a prompt without response.
    """
    by = {row["prompt"]: row for row in prompts}
    if strange := [row["prompt"] for row in responses if row["prompt"] not in by]:
        raise UserError(f"{len(strange)} responses belong to no prompt, the first to {strange[0]!r:.80}")
    if missing := set(by) - {row["prompt"] for row in responses}:
        raise UserError(f"{len(missing)} of {len(by)} prompts have no response, such as {min(missing)!r:.80}")
    result = {}
    for name, loose in (("strict", False), ("loose", True)):
        judged = []
        for row in responses:
            asked = by[row["prompt"]]
            shown = (FORMATS["final"].find(row["response"], False) or "").strip()
            judged.append(judge(shown, asked["instruction_id_list"], asked["kwargs"], loose=loose))
        result[f"{name}/prompt"], result[f"{name}/instruction"] = accuracies(judged)
    return result


@piped
def main(argv: Sequence[str]) -> None:
    """Prints one line per figure, in percent."""
    if len(argv) != 2:
        raise SystemExit(__doc__)
    try:
        found = figures(read_rows(argv[0]), read_rows(argv[1]))
    except (UserError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
    for name, value in found.items():
        print(f"{name:20s} {100 * value:6.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
