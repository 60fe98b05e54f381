"""``python -m brorl_jax.data.prepare NAME --out DIR``: see ``--help`` and docs/data.md."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from brorl_jax import rewards
from brorl_jax.commandline import piped
from brorl_jax.data import files
from brorl_jax.data.prepare import benchmarks, code, families, generated, passrates, pipeline, similar
from brorl_jax.data.prepare.families import FAMILIES, Family
from brorl_jax.data.prepare.pipeline import Benchmark, Options

_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")
_QUESTION = ("question", "problem", "prompt", "text", "Question")  # of benchmark files, the first that a row has
assert benchmarks and code and generated  # imported for the families that they register


@piped
def main(argv: Sequence[str] | None = None) -> None:
    """Prepares one family as the command line says; errors are one line and status 1."""
    arguments = _parser().parse_args(argv)
    try:
        manifest = prepare(arguments)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    dropped = ", ".join(f"{count} {reason}" for reason, count in manifest["dropped"].items()) or "none left out"
    print(f"{arguments.out}: {manifest['rows_out']} of {manifest['rows_in']} rows ({dropped})")
    print(f"sha256 {manifest['sha256']}; licence: {manifest['licence']}")


def prepare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Does what the parsed arguments say; returns the manifest.

    Raises:
        ValueError: data is missing or of another shape, or an option makes no sense.
    """
    name, fam = arguments.name, FAMILIES[arguments.name]
    options = _options(arguments)
    if fam.benchmark:
        options = dataclasses.replace(options, near=0.0)
    rewards.load_plugins(arguments.plugins)
    rates = passrates.read(arguments.pass_rates) if arguments.pass_rates else {}
    rows, origin = _rows(name, fam, arguments)
    benchmark = _benchmark(arguments.against, arguments.source)
    result = pipeline.convert(name, fam, rows, verifier=arguments.verifier, prompt=arguments.prompt)
    pipeline.clean(result, benchmark, rates, options)
    description = {
        "about": fam.about,
        "licence": fam.licence,
        "origin": origin,
        "against": benchmark.sources,
        "options": dataclasses.asdict(options),
        "pass_rates": {"files": _described(arguments.pass_rates), "prompts": len(rates)} if rates else {},
    }
    return pipeline.write(Path(arguments.out), name, result, description)


def _parser() -> argparse.ArgumentParser:
    listing = "\n".join(f"  {name:<14} {fam.about}" for name, fam in FAMILIES.items())
    parser = argparse.ArgumentParser(
        "python -m brorl_jax.data.prepare",
        description="Makes a training set or a benchmark for data sources of kind 'prepared'.",
        epilog=f"families:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("name", choices=sorted(FAMILIES), metavar="NAME", help="the family, see below")
    add("--out", required=True, help="directory to write; a prepared one is replaced")
    add("--from", dest="source", nargs="+", default=[], metavar="PATH", help="files or directories instead of the hub")
    add("--split", default="", help="of the hub data set, instead of the family's; such as test, for evaluation")
    add("--revision", default="", help="branch, tag or commit of the hub data set")
    add("--verifier", default="", help="instead of the family's")
    add("--plugins", nargs="+", default=[], metavar="MODULE", help="modules that register verifiers of one's own")
    add("--prompt", default="", help="template instead of the family's, with {question}")
    add("--limit", type=int, default=0, metavar="N", help="keep N rows, chosen by a hash of their ids")
    add("--near", type=float, default=similar.NEAR, help="similarity from which rows are repeats; 0 keeps them")
    add("--templates", action="store_true", help="rows that differ in numbers and gold only are repeats, too")
    add("--against", nargs="+", default=[], metavar="PATH", help="benchmark files; their questions are left out")
    add("--overlap", type=float, default=similar.OVERLAP, help="share of a benchmark question that is too much")
    add("--pass-rates", nargs="+", default=[], metavar="PATH", help="evaluations or rollouts of a run on these prompts")
    add("--keep", default="0:1", metavar="LOW:HIGH", help="pass rates to keep, such as 0.05:0.95")
    add("--unmeasured", choices=("keep", "drop"), default="keep", help="prompts without a pass rate")
    add("--tasks", nargs="+", default=[], help="reasoning_gym: which tasks or categories; all categories by default")
    add("--size", type=int, default=0, help="generated families: rows, of each task")
    add("--seed", type=int, default=0, help="generated families: other seeds, other rows")
    return parser


def _options(arguments: argparse.Namespace) -> Options:
    if not (arguments.near == 0 or 0 < arguments.near <= 1) or not 0 < arguments.overlap <= 1:
        raise ValueError(f"--near {arguments.near} and --overlap {arguments.overlap} must lie in (0, 1]")
    for option in ("limit", "size"):
        if getattr(arguments, option) < 0:
            raise ValueError(f"--{option} {getattr(arguments, option)} must be at least 0")
    if arguments.prompt and arguments.prompt.count("{question}") != 1:
        raise ValueError(f"--prompt must contain {{question}} exactly once, got {arguments.prompt!r}")
    keep = passrates.interval(arguments.keep)
    if keep != (0.0, 1.0) and not arguments.pass_rates:
        raise ValueError(f"--keep {arguments.keep} needs --pass-rates, the files to measure by")
    return Options(
        near=arguments.near,
        templates=arguments.templates,
        overlap=arguments.overlap,
        keep=keep,
        unmeasured=arguments.unmeasured,
        limit=arguments.limit,
    )


def _rows(name: str, fam: Family, arguments: argparse.Namespace) -> tuple[Iterable[Mapping[str, Any]], Any]:
    """The family's rows, and where they come from."""
    if fam.generate:
        if arguments.source:
            raise ValueError(f"{name} is generated: it takes --tasks, --size and --seed, not --from")
        settings = {"tasks": list(arguments.tasks), "size": arguments.size, "seed": arguments.seed}
        return fam.generate(arguments.size, arguments.seed, arguments.tasks), settings
    if arguments.source and name == "prepared":
        return [row for path in arguments.source for row in files.read_prepared(path)], _described(arguments.source)
    if arguments.source:
        paths = _files(arguments.source)
        return [row for path in paths for row in files.read_rows(path)], _described(paths)
    if fam.hub is None:
        raise ValueError(f"{name} is on no hub: name its files with --from")
    more = {"data_files": fam.hub.data_files} if fam.hub.data_files else {}
    split = arguments.split or fam.hub.split
    rows = files.read_hub(fam.hub.path, fam.hub.name, split, arguments.revision, **more)
    return rows, {**dataclasses.asdict(fam.hub), "split": split, "revision": arguments.revision}


def _files(paths: Sequence[str | Path]) -> list[Path]:
    found: list[Path] = []
    for path in map(Path, paths):
        inside = sorted(p for p in path.rglob("*") if p.name.endswith(_SUFFIXES)) if path.is_dir() else [path]
        if not inside:
            raise ValueError(f"no data file in {path} ({', '.join(_SUFFIXES)})")
        found += inside
    return found


def _described(paths: Sequence[str | Path]) -> list[dict[str, str]]:
    """Files by name and hash: a manifest does not say where they lay."""
    return [{"file": path.name, "sha256": files.sha256(path)} for path in _hashable(paths)]


def _hashable(paths: Sequence[str | Path]) -> list[Path]:
    inside = [file for path in map(Path, paths) for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    return [file for file in inside if file.is_file()]


def _benchmark(paths: Sequence[str], training: Sequence[str]) -> Benchmark:
    """Every question of the benchmark files; files that are trained on are passed over within directories."""
    trained = {file.resolve() for file in _files(training)} if training else set()
    chosen = [file for file in _files(paths) if file.resolve() not in trained] if paths else []
    questions, places, sources = [], [], []
    for file in chosen:
        rows = files.read_rows(file)
        for number, row in enumerate(rows, 1):
            try:
                questions.append(_benchmark_question(file, row))
            except ValueError as error:
                raise ValueError(f"--against {file}, row {number}: {error}") from error
            places.append(f"{file.name}:{number}")
        sources.append({"file": file.name, "sha256": files.sha256(file), "questions": len(rows)})
    return Benchmark(questions, places, sources)


def _benchmark_question(file: Path, row: Mapping[str, Any]) -> str:
    if "meta" in row and "verifier" in row:  # a prepared set
        return pipeline.question(row)
    question = families.column(row, *_QUESTION)
    return f"{row['Body']} {question}" if "Body" in row else str(question)


if __name__ == "__main__":
    main()
