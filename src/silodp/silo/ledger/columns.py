"""Compute profiles of a table, by which a data set is recognised: how often each value occurs.

A profile is about some of the columns: a single one, a pair, a group of coarse ones, or the whole
row without its number.

A row's mark changes with any column, and a column's with any row. So both are lost once a file
gains a column and a row. A profile's rows depend on its own columns only, and are counted value by
value.

Take two data sets of different people with counts a and b of a value, where b's data set has rho
times as many rows. Then `a b - (rho a (a - 1) + b (b - 1) / rho) / 2` is 0 or less on average:
people match across the two no more often than within them.

Each person in both adds 1. Had the people been dealt to the two at random, its variance given t = a
+ b would be t (t - 1) / 2. So a common public value, such as an age, proves nothing. Many values
that occur just as often in both, or rare ones that occur in both, prove a lot.

If a record is a person, there is also a profile of the persons' ids (PERSON). A person whose id is
in both data sets is in both, whatever the rows contain. How many rows a person has is not stored.

The rule assumes that people are drawn independently. Record numbers are not, and are left out.
Neither are ranks or designed experiments, which may be taken for the same data set.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

KEPT = 2000
"""About how many different values a profile keeps. Of more values, it keeps those whose codes begin
with enough zero bits, which is the same choice for every data set.
"""
# Most columns that are profiles of their own, and most columns that are paired. Those with the most
# different values come first.
SINGLES = 32
PAIRED = 8
# For each k up to LEVELS there are GROUPS groups. Each coarse column is in each of these with
# probability 1 / 2^k.
LEVELS = 3
GROUPS = 8
COARSE = 8  # a column is coarse if one value has at least one COARSEth of the rows
TELLING = 16  # a profile with fewer different values is not worth keeping
SURE = 4.5  # standard deviations by which matches must exceed those of people dealt at random
SINGLE, PAIR, CORE, GROUP, PERSON = range(5)
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_HEAD = struct.Struct(">BBI")


@dataclass(frozen=True, eq=False, repr=False)
class Profile:
    """How often each value occurs.

    In memory, marks are the values' codes. In a sketch they are keyed, after a byte with the code's
    number of leading zero bits.
    """

    kind: int
    level: int  # zero bits that each code begins with
    marks: np.ndarray  # uint64, sorted, different
    counts: np.ndarray

    def keyed(self, mark: Callable[[bytes], bytes]) -> Profile:
        """Return the profile with marks that `mark` makes of its codes by a secret key."""
        kept = [
            int.from_bytes(mark(bytes([self.kind]) + code.tobytes())[:7], "big")
            for code in self.marks.astype("<u8")
        ]
        marks = np.array(kept, np.uint64) | (_zeros(self.marks) << np.uint64(56))
        order = np.argsort(marks)
        return Profile(self.kind, self.level, marks[order], self.counts[order])

    def packed(self) -> bytes:
        """Return the profile as bytes."""
        head = _HEAD.pack(self.kind, self.level, len(self.marks))
        return head + self.marks.astype(">u8").tobytes() + self.counts.astype(">u4").tobytes()

    def thinned(self, level: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the marks and counts of the codes with at least `level` leading zero bits."""
        stays = self.marks >> np.uint64(56) >= level
        return self.marks[stays], self.counts[stays].astype(float)

    def share(self, other: Profile) -> float:
        """Return about which share of the smaller data set's people is in both. Both profiles are
        keyed.

        Return 0 if the matches may be chance. Equal ids are never chance.
        """
        level = max(self.level, other.level)
        mine, a = self.thinned(level)
        theirs, b = other.thinned(level)
        if self.kind == other.kind == PERSON:
            return len(np.intersect1d(mine, theirs)) / max(1, min(len(mine), len(theirs)))
        # No value adds more than 1 to the excess, and no value in both less than 1 to its variance.
        # So fewer common values than this cannot be significant.
        fewest = SURE**2
        if self.kind != other.kind or min(len(mine), len(theirs)) <= fewest:
            return 0.0
        at = np.minimum(np.searchsorted(theirs, mine), len(theirs) - 1)
        both = theirs[at] == mine
        if both.sum() <= fewest:
            return 0.0
        alone = np.ones(len(theirs), bool)
        alone[at[both]] = False
        a = np.concatenate([a, np.zeros(alone.sum())])
        b = np.concatenate([np.where(both, b[at], 0), b[alone]])
        rho = b.sum() / a.sum()
        weight = 1 / np.maximum(1, (a + b) / 2)
        excess = weight * (a * b - (rho * a * (a - 1) + b * (b - 1) / rho) / 2)
        # One value that new rows have far more often must not outweigh all the others.
        total = np.maximum(excess, -8).sum()
        spread = np.sqrt((weight**2 * (a + b) * (a + b - 1) / 2).sum())
        if total > SURE * spread:
            return float(min(1.0, total / min((weight * a).sum(), (weight * b).sum())))
        return 0.0

    def people(self) -> float:
        """Return about how many people the profile is of."""
        return float(self.counts.sum()) * 2**self.level

    def repeats(self) -> float:
        """Return the share of people who have their values in common with others of the same data
        set.
        """
        return 1 - float((self.counts == 1).sum() / self.counts.sum())

    def merged(self, other: Profile) -> Profile:
        """Return a profile of the values of both, each with its larger count."""
        level = max(self.level, other.level)
        mine, a = self.thinned(level)
        theirs, b = other.thinned(level)
        marks = np.union1d(mine, theirs)
        counts = np.zeros(len(marks))
        counts[np.searchsorted(marks, mine)] = a
        at = np.searchsorted(marks, theirs)
        counts[at] = np.maximum(counts[at], b)
        return _thin(
            Profile(self.kind, level, marks, counts.astype(np.uint32)), marks >> np.uint64(56)
        )


def unpacked(content: bytes) -> list[Profile]:
    """Return the profiles in these bytes. Raise ValueError if they are no packed profiles."""
    profiles = []
    place = 0
    while place < len(content):
        if len(content) < place + _HEAD.size:
            raise ValueError("cut short")
        kind, level, count = _HEAD.unpack_from(content, place)
        marks = np.frombuffer(content, ">u8", count, place + _HEAD.size).astype(np.uint64)
        counts = np.frombuffer(content, ">u4", count, place + _HEAD.size + 8 * count).astype(
            np.uint32
        )
        profiles.append(Profile(kind, level, marks, counts))
        place += _HEAD.size + 12 * count
    return profiles


def profiles_of(columns: list[np.ndarray]) -> list[Profile]:
    """Return the unkeyed profiles of a table. The order of its columns does not matter."""
    n = len(columns[0])
    core = np.zeros(n, np.uint64)
    groups = np.zeros((LEVELS * GROUPS, n), np.uint64)
    members: list[list[int]] = [[] for _ in groups]
    order: dict[int, tuple[int, int]] = {}
    for j, column in enumerate(columns):
        codes = _codes(column)
        values, counts = np.unique(codes, return_counts=True)
        if len(values) == 1 or _record_number(column, counts):
            continue
        # All columns with at least n / 2 different values count the same. Among them the smallest
        # code decides, so that the choice stays the same when columns are added.
        order[j] = (-min(2 * len(values), n), int(values[0]))
        core += codes
        most = int(counts.max())
        if most * COARSE >= n:
            # A coarse column is recognised by its most frequent value and that value's rough share,
            # which some new rows do not change.
            column_mark = splitmix(values[[counts.argmax()]] + np.uint64(COARSE * most // n))
            for group in np.flatnonzero(_drawn(column_mark)):
                groups[group] += splitmix(codes ^ column_mark)
                members[group].append(j)
    by_number = sorted(order, key=lambda j: order[j])
    # A column with very many different values is not paired: it identifies people on its own.
    paired = [j for j in by_number if -order[j][0] < n][:PAIRED]
    codes = {j: _codes(columns[j]) for j in {*by_number[:SINGLES], *paired}}
    wanted: list[tuple[int, np.ndarray]] = [(SINGLE, codes[j]) for j in by_number[:SINGLES]]
    wanted += [(PAIR, codes[i] + codes[j]) for k, i in enumerate(paired) for j in paired[k + 1 :]]
    wanted += [(CORE, core)]
    different = {tuple(inside): group for group, inside in enumerate(members) if len(inside) > 1}
    wanted += [(GROUP, groups[group]) for group in different.values()]
    return [profile for kind, values in wanted if (profile := _profile(kind, values))]


def persons_of(ids: Iterable[str]) -> Profile:
    """Return the unkeyed profile of persons by their ids, each in one spelling. Empty ids are left
    out.
    """
    digests = {hashlib.sha256(one.encode()).digest()[:8] for one in ids if one}
    codes = np.unique(np.frombuffer(b"".join(digests), "<u8").astype(np.uint64))
    return _thin(Profile(PERSON, 0, codes, np.ones(len(codes), np.uint32)), _zeros(codes))


def _profile(kind: int, values: np.ndarray) -> Profile | None:
    """Return the profile of these values, or None if they have too few different ones."""
    codes, counts = np.unique(splitmix(values), return_counts=True)
    if len(codes) >= TELLING:
        return _thin(Profile(kind, 0, codes, counts.astype(np.uint32)), _zeros(codes))
    return None


def _thin(profile: Profile, zeros: np.ndarray) -> Profile:
    """Return the profile with at most as many marks as its kind keeps."""
    level = profile.level
    # Few of many persons may come back, so as many of their marks are kept as of rows.
    most = {CORE: 2 * KEPT, PERSON: 50 * KEPT}.get(profile.kind, KEPT)
    while (zeros >= level).sum() > most:
        level += 1
    stays = zeros >= level
    return Profile(profile.kind, level, profile.marks[stays], profile.counts[stays])


def exactly(columns: Iterable[np.ndarray]) -> bytes:
    """Return a digest of all cells in their order, to the last bit and letter.

    `comparable`, which is for recognition, takes some different cells for the same. This does not.
    """
    digest = hashlib.sha256()
    for column in columns:
        plain = column.dtype.kind in "biufSUMm"
        if plain:
            content = np.ascontiguousarray(column).reshape(-1).view(np.uint8).data
        else:
            content = "\n".join(map(repr, column.tolist())).encode()
        digest.update(f"{column.dtype.str} {column.shape} {len(content)}\n".encode())
        digest.update(content)
    return digest.digest()


def comparable(values: np.ndarray) -> np.ndarray:
    """Return the values as float64: integers as they are, others in single precision.

    Integers are exact since record numbers may be large. The gate uses other values in single
    precision too.
    """
    exact = values.astype("<f8", order="C")
    with np.errstate(over="ignore"):
        exact = np.where(exact == np.rint(exact), exact, exact.astype(np.float32))
    exact = exact + 0.0  # -0 becomes 0
    exact[np.isnan(exact)] = np.nan  # there are many codes of NaN, and this is one of them
    return exact


def _codes(column: np.ndarray) -> np.ndarray:
    """Return a code for each cell."""
    return splitmix(comparable(column).view(np.uint64))


def _record_number(column: np.ndarray, counts: np.ndarray) -> bool:
    """Return whether a column looks like record numbers, which another hospital has too.

    These are whole numbers close together. Far fewer pairs of them are equal than if each were
    drawn by chance.
    """
    values = column.astype(np.float64)
    values = values[np.isfinite(values)]
    if len(values) == 0 or (values != np.rint(values)).any():
        return False
    low, high = np.quantile(values, [0.05, 0.95])
    width = (high - low) / 0.9 + 1
    by_chance = len(values) ** 2 / (2 * width)
    return bool(
        width <= 50 * len(values)
        and by_chance >= 5
        and (counts * (counts - 1.0)).sum() / 2 < by_chance / 4
    )


def _drawn(column_mark: np.ndarray) -> np.ndarray:
    """Return which groups a column is in.

    It depends on the column's own mark only, so an added column leaves most groups as they were.
    """
    numbers = np.arange(LEVELS * GROUPS, dtype=np.uint64)
    draws = splitmix(column_mark + numbers).reshape(LEVELS, GROUPS)
    return np.concatenate([draw >> np.uint64(63 - k) == 0 for k, draw in enumerate(draws)])


def splitmix(values: np.ndarray) -> np.ndarray:
    """Return the SplitMix64 hash of each value.

    Close numbers become distant ones, the same on every machine and in every version.
    """
    z = values + GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _zeros(codes: np.ndarray) -> np.ndarray:
    """Return the number of leading zero bits of each code, up to 53."""
    return (53 - np.frexp((codes >> np.uint64(11)).astype(np.float64))[1]).astype(np.uint64)


def by_chance(one: Profile, other: Profile) -> float:
    """Return about the share of the smaller one's people that would match the larger one by chance.

    The estimate is for two data sets of different people. It is the share of repeats within the
    larger one. It is at most what the smaller one's own repeats, generously counted, allow: copied
    rows are no chance.
    """
    small, large = sorted((one, other), key=Profile.people)
    repeated = small.repeats() * small.people()
    most = (repeated + 3 * repeated**0.5 + 9) / small.people()
    return min(large.repeats(), most * large.people() / small.people())


def merged(old: Iterable[Profile], new: Iterable[Profile], most: int) -> list[Profile]:
    """Return every profile of both, with similar ones merged, and the oldest `most` of these."""
    profiles = list(old)
    for profile in new:
        shares = ((earlier.share(profile), k) for k, earlier in enumerate(profiles))
        share, same = max(shares, default=(0.0, 0))
        if share > 0:
            profiles[same] = profiles[same].merged(profile)
        else:
            profiles.append(profile)
    return profiles[:most]
