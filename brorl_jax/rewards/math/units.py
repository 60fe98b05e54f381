r"""Units of measurement: a small table of names, prefixes and dimensions.

``parse_unit("km/h")`` gives a factor to SI and the exponents of the base dimensions. Scales with an offset (degrees
Celsius, Fahrenheit) are units of their own and convert to nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from fractions import Fraction

_BASE = ("m", "kg", "s", "A", "K", "mol", "cd", "rad", "bit", "dollar", "degC", "degF")
Dimension = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Unit:
    """``factor`` times the product of the base units to the powers ``dimension``; exact unless pi is in it."""

    factor: Fraction
    dimension: Dimension


def _unit(factor: str | float | Fraction, **powers: int) -> Unit:
    return Unit(Fraction(factor), tuple(powers.get(base, 0) for base in _BASE))


_ONE = _unit(1)
_PREFIXES = {
    "Y": 24, "Z": 21, "E": 18, "P": 15, "T": 12, "G": 9, "M": 6, "k": 3, "h": 2, "d": -1, "c": -2, "m": -3,
    "u": -6, "n": -9, "p": -12, "f": -15, "a": -18,
}  # fmt: skip
_PREFIX_NAMES = {
    "tera": 12, "giga": 9, "mega": 6, "kilo": 3, "hecto": 2, "deci": -1, "centi": -2, "milli": -3, "micro": -6,
    "nano": -9, "pico": -12, "femto": -15,
}  # fmt: skip
_J = {"kg": 1, "m": 2, "s": -2}
_V = {"kg": 1, "m": 2, "s": -3, "A": -1}
# Symbols that take SI prefixes, their names, and the unit.
_PREFIXED: tuple[tuple[tuple[str, ...], tuple[str, ...], Unit], ...] = (
    (("m",), ("meter", "metre"), _unit(1, m=1)),
    (("g",), ("gram", "gramme"), _unit("1/1000", kg=1)),
    (("s",), ("second",), _unit(1, s=1)),
    (("A",), ("ampere", "amp"), _unit(1, A=1)),
    (("K",), ("kelvin",), _unit(1, K=1)),
    (("mol",), ("mole",), _unit(1, mol=1)),
    (("cd",), ("candela",), _unit(1, cd=1)),
    (("rad",), ("radian",), _unit(1, rad=1)),
    (("Hz",), ("hertz",), _unit(1, s=-1)),
    (("N",), ("newton",), _unit(1, kg=1, m=1, s=-2)),
    (("Pa",), ("pascal",), _unit(1, kg=1, m=-1, s=-2)),
    (("J",), ("joule",), _unit(1, **_J)),
    (("W",), ("watt",), _unit(1, kg=1, m=2, s=-3)),
    (("C",), ("coulomb",), _unit(1, A=1, s=1)),
    (("V",), ("volt",), _unit(1, **_V)),
    (("F",), ("farad",), _unit(1, kg=-1, m=-2, s=4, A=2)),
    (("ohm", "Ω", "\\Omega"), ("ohm",), _unit(1, kg=1, m=2, s=-3, A=-2)),
    (("T",), ("tesla",), _unit(1, kg=1, s=-2, A=-1)),
    (("Wb",), ("weber",), _unit(1, kg=1, m=2, s=-2, A=-1)),
    (("H",), ("henry",), _unit(1, kg=1, m=2, s=-2, A=-2)),
    (("L", "l"), ("liter", "litre"), _unit("1/1000", m=3)),
    (("M",), ("molar",), _unit(1000, mol=1, m=-3)),
    (("eV",), ("electronvolt",), _unit("1.602176634e-19", **_J)),
    (("cal",), ("calorie",), _unit("4.184", **_J)),
    (("erg",), ("erg",), _unit("1e-7", **_J)),
    (("dyn",), ("dyne",), _unit("1e-5", kg=1, m=1, s=-2)),
    (("bar",), ("bar",), _unit(100_000, kg=1, m=-1, s=-2)),
    (("pc",), ("parsec",), _unit("30856775814913673", m=1)),
    (("bit",), ("bit",), _unit(1, bit=1)),
    (("B",), ("byte",), _unit(8, bit=1)),
    (("yr",), ("year",), _unit(31_557_600, s=1)),
    (("Bq",), ("becquerel",), _unit(1, s=-1)),
)  # fmt: skip
_FIXED: tuple[tuple[tuple[str, ...], Unit], ...] = (
    (("min", "minute", "minutes"), _unit(60, s=1)),
    (("sec", "secs"), _unit(1, s=1)),
    (("h", "hr", "hrs", "hour", "hours"), _unit(3600, s=1)),
    (("day", "days"), _unit(86_400, s=1)),
    (("week", "weeks"), _unit(604_800, s=1)),
    (("years", "yrs"), _unit(31_557_600, s=1)),
    (("in", "inch", "inches"), _unit("0.0254", m=1)),
    (("ft", "foot", "feet"), _unit("0.3048", m=1)),
    (("yd", "yard", "yards"), _unit("0.9144", m=1)),
    (("mi", "mile", "miles"), _unit("1609.344", m=1)),
    (("mph",), _unit("0.44704", m=1, s=-1)),
    (("kph", "kmh"), _unit("5/18", m=1, s=-1)),
    (("angstrom", "angstroms", "\\AA"), _unit("1e-10", m=1)),
    (("ly", "lightyear", "lightyears"), _unit(9_460_730_472_580_800, m=1)),
    (("AU", "au"), _unit(149_597_870_700, m=1)),
    (("lb", "lbs", "pound", "pounds"), _unit("0.45359237", kg=1)),
    (("oz", "ounce", "ounces"), _unit("0.028349523125", kg=1)),
    (("ton", "tons", "tonne", "tonnes"), _unit(1000, kg=1)),
    (("amu", "u", "Da"), _unit("1.66053906660e-27", kg=1)),
    (("atm", "atmosphere", "atmospheres"), _unit(101_325, kg=1, m=-1, s=-2)),
    (("mmHg", "torr", "Torr"), _unit("133.322387415", kg=1, m=-1, s=-2)),
    (("hp", "horsepower"), _unit("745.69987158227", kg=1, m=2, s=-3)),
    (("ha", "hectare", "hectares"), _unit(10_000, m=2)),
    (("acre", "acres"), _unit("4046.8564224", m=2)),
    (("cc",), _unit("1e-6", m=3)),
    (("gal", "gallon", "gallons"), _unit("0.003785411784", m=3)),
    (("dollar", "dollars", "USD", "usd"), _unit(1, dollar=1)),
    (("cent", "cents"), _unit("1/100", dollar=1)),
    (("deg", "^\\circ", "°"), Unit(Fraction(math.pi) / 180, _unit(1, rad=1).dimension)),
    (("rpm",), Unit(Fraction(math.pi) / 30, _unit(1, rad=1, s=-1).dimension)),
    (("rev", "revolution", "revolutions"), Unit(Fraction(math.pi) * 2, _unit(1, rad=1).dimension)),
    (("arcsec", "arcsecs", "arcsecond", "arcseconds"), Unit(Fraction(math.pi) / 648_000, _unit(1, rad=1).dimension)),
    (("degC", "^\\circC", "°C", "celsius", "Celsius"), _unit(1, degC=1)),
    (("degF", "^\\circF", "°F", "fahrenheit", "Fahrenheit"), _unit(1, degF=1)),
)
_MAX_CHARS = 60
_FACTOR = re.compile(r"(.*?)(?:\^?\(?([+-]?\d)\)?)?")


@functools.cache
def _table() -> dict[str, Unit]:
    table: dict[str, Unit] = {}
    for symbols, names, unit in _PREFIXED:
        for prefix, power in {**_PREFIXES, "": 0}.items():
            table.update((prefix + s, _scaled(unit, power)) for s in symbols if prefix + s not in table)
        for prefix, power in {**_PREFIX_NAMES, "": 0}.items():
            table.update((prefix + n + plural, _scaled(unit, power)) for n in names for plural in ("", "s"))
    for names_, unit in _FIXED:  # after the prefixed ones: min is a minute, not a milli-inch
        table.update((n, unit) for n in names_)
    return table


def _scaled(unit: Unit, power: int) -> Unit:
    return Unit(unit.factor * Fraction(10) ** power, unit.dimension)


@functools.lru_cache(maxsize=4096)
def parse_unit(text: str) -> Unit | None:
    r"""The unit that ``text`` names, or None: ``kg m/s^2``, ``\text{kg}\cdot\text{m}^{-1}``, ``metres per second``."""
    if len(text) > _MAX_CHARS:
        return None
    text = re.sub(r"\\(?:text|mathrm)\s*|[{}$]|\\[ ,;!]|~", " ", text)
    text = re.sub(r"\\mu\s*", "u", text.replace("µ", "u").replace("μ", "u"))
    text = re.sub(r"\s*\^\s*", "^", text).replace("\\circ ", "\\circ")
    text = re.sub(r"\bsquared?\s+(\w+)|\b(\w+)\s+squared\b", lambda m: f"{m[1] or m[2]}^2", text)
    text = re.sub(r"\bcubic\s+(\w+)|\b(\w+)\s+cubed\b", lambda m: f"{m[1] or m[2]}^3", text)
    text = re.sub(r"\bper\b", "/", text)
    over = re.split(r"\s*/\s*", text.strip())
    total = _ONE
    for i, side in enumerate(over):
        inner = side.strip().removeprefix("(").removesuffix(")") if side.strip().startswith("(") else side.strip()
        factors = [f for f in re.split(r"\s*(?:\\cdot|\\times|\*|\s)\s*", inner) if f]
        if not factors and (i or len(over) == 1):
            return None
        for factor in factors:
            unit = _power(factor)
            if unit is None:
                return None
            total = _times(total, unit, -1 if i else 1)
    return total


def _power(text: str) -> Unit | None:
    match = _FACTOR.fullmatch(text)
    known = _table()
    if text in known:
        return known[text]
    if (
        match is None
        or (unit := known.get(match[1]) or known.get(match[1].lower() if len(match[1]) > 3 else "")) is None
    ):
        return None
    return _times(_ONE, unit, int(match[2] or 1))


def _times(a: Unit, b: Unit, power: int) -> Unit:
    return Unit(a.factor * b.factor**power, tuple(x + y * power for x, y in zip(a.dimension, b.dimension, strict=True)))


def conversion(source: str, target: str) -> Fraction | None:
    """By what to multiply a value in ``source`` to get it in ``target``; None unless both are known and alike."""
    a, b = parse_unit(source), parse_unit(target)
    return None if a is None or b is None or a.dimension != b.dimension else a.factor / b.factor
