"""Wrong HITs of users who move what can be moved after they have seen results.

    python -m benchmarks.seals [--campaigns 2000]

In a campaign a hypothesis is sealed that is just not true (no gap for "better" and "worse", a gap
of the margin for "within"), and its user then asks `verdicts`, which is what `compare` asks, again
and again, with other runs or by another measure each time. A campaign is wrong if any answer is a
sealed HIT. Beside it stands the share of campaigns in which the ordinary 95 % interval of what was
given would have shown it once. Losses are made up; nothing is trained. Exit code 1 where more than
5 % of all campaigns are wrong.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from pathlib import Path

import numpy as np
from scipy import stats

from pretrain.runs.curves import RunCurves
from pretrain.runs.finished import FinishedRun, ModelSize, RunResult, StateBytes
from pretrain.study.gaps import CONFIDENCE, FEWEST_SEEDS, NATS, PairedGap, paired_gap
from pretrain.study.hypothesis import Hypothesis
from pretrain.study.seal import Seal
from pretrain.study.sealed import Measure, Sealed, SealedGrid, design_settings
from pretrain.study.verdict import SEQUENTIAL, Runs, fixed_rule, verdicts

BAR = 0.05
CAMPAIGNS = 2000
MOST = 20
"""Pairs that a user makes at most."""
MEASURES = ("tokens", "flops", "seconds")
PLACE = Path("/campaign")
SD = 0.01
"""Standard deviation of the difference of two runs, in nats; a seed has half of its square."""
_QUANTILES = [math.inf] * 2 + [
    float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)) for n in range(2, MOST + 1)
]


@dataclass(frozen=True)
class Look:
    """What a user asks about once.

    Attributes:
        runs: that are given to `compare`.
        match: at which the report compares.
        subjects: of the report.
    """

    runs: Sequence[FinishedRun]
    match: str = "tokens"
    subjects: Sequence[str] = ()


@dataclass(frozen=True)
class Campaign:
    """A sealed hypothesis, and losses of all runs that its user might make.

    Attributes:
        seal: of the hypotheses, all of them not true.
        losses: {match: {design: losses by seed, from seed 1 on}}.
    """

    seal: Seal
    losses: Mapping[str, Mapping[str, Sequence[float]]]

    def runs(self, pairs: Sequence[int], designs: Sequence[str] = ("new",)) -> list[FinishedRun]:
        """Return the runs of some pairs.

        Args:
            pairs: seeds.
            designs: beside the baseline.
        """
        return [
            made_run(name, seed, self.losses["tokens"][name][seed - 1])
            for name in ("old", *designs)
            for seed in pairs
        ]

    def gap(self, design: Runs, baseline: Runs, match: str) -> PairedGap | None:
        """Return the gap of runs at equal `match`.

        Args:
            design: runs of the design.
            baseline: runs of its baseline.
            match: tokens, flops or seconds.
        """
        values, base = (
            tuple((seed, self.loss(run, match)) for seed, run in runs.items())
            for runs in (design, baseline)
        )
        return _gap(values, base)

    def loss(self, run: FinishedRun, match: str) -> float:
        """Return the loss of a run; one that was made again has the same by every measure.

        Args:
            run: of `made_run`.
            match: tokens, flops or seconds.
        """
        place = run.seed - 1
        own = run.result.validation_loss or 0.0
        again = own != self.losses["tokens"][run.variant][place]
        return own if again else self.losses[match][run.variant][place]


@lru_cache(maxsize=64)
def _gap(
    values: tuple[tuple[int, float], ...], base: tuple[tuple[int, float], ...]
) -> PairedGap | None:
    """Return the gap of (seed, loss) pairs; users ask about the same again and again."""
    return paired_gap("old", dict(values), dict(base), NATS)


def made_run(name: str, seed: int, loss: float, bank_seed: int | None = None) -> FinishedRun:
    """Return a finished run of made-up numbers, which lies nowhere.

    Args:
        name: of its design.
        seed: of the run.
        loss: validation loss, in nats per token.
        bank_seed: of the frozen bank; None: the run's.
    """
    config = {
        "run": {"name": f"{name}-seed_{seed}", "seed": seed},
        "attention": {"variant": name, "seed": seed if bank_seed is None else bank_seed},
        "data": {"seed": seed},
    }
    return FinishedRun(
        path=PLACE / f"{name}-seed_{seed}",
        name=f"{name}-seed_{seed}",
        variant=name,
        seed=seed,
        config=config,
        environment={"git_commit": "c", "started": "2099-01-01T00:00:00+0000"},
        data_fingerprint="d",
        validation_tokens={},
        zero_stage=1,
        result=RunResult(
            1, 1, loss, math.exp(loss), unigram_perplexity=9.0, perplexity_by_source={}
        ),
        size=ModelSize(1, 0),
        states=StateBytes(1, 1, 1, optimizer_state_bytes=1, checkpoint_bytes=1),
        curves=RunCurves(np.array([1]), np.array([1]), {}),
    )


def made_campaign(
    random: np.random.Generator, pairs: int, designs: Sequence[str] = ("new",), trial: bool = False
) -> Campaign:
    """Return a campaign in which no hypothesis is true.

    Args:
        random: where chance comes from.
        pairs: that are sealed; of a trial at most.
        designs: beside the baseline.
        trial: the seal is a trial's.
    """
    question = str(random.choice(["better", "worse", "within"]))
    claims = [Hypothesis(design, question, 2.0, "old") for design in designs]
    truth = claims[0].edges[1] if question == "within" else 0.0
    losses = {}
    of_seeds = {name: random.standard_normal(MOST) for name in ("old", *designs)}
    for match in MEASURES:
        losses[match] = {
            name: (
                4.0 + truth * (name != "old") + SD / 2 * (noise + random.standard_normal(MOST))
            ).tolist()
            for name, noise in of_seeds.items()
        }
    measure = Measure(match="tokens", subjects=[], rule=SEQUENTIAL if trial else fixed_rule(pairs))
    sealed = Sealed(
        hypotheses=claims,
        stopping_rule="",
        fixed_n=not trial,
        measure=measure,
        grid=SealedGrid(file="grid.yaml", sha256=""),
        seeds=[*range(1, pairs + 1)],
        settings={
            name: design_settings(made_run(name, 1, 4.0).config) for name in ("old", *designs)
        },
        other_seeds={name: {"attention.seed": None} for name in ("old", *designs)},
        data=["d"],
        commit="c",
        sealed="2026-01-01T00:00:00+0000",
    )
    seal = Seal(PLACE / "seals/0.json", PLACE, sealed, raw={}, intact=True)
    return Campaign(seal, losses)


# What users do. Each returns a campaign and what is asked in it.

Asked = tuple[Campaign, list[Look]]
User = Callable[[np.random.Generator], Asked]


def adds_seeds(random: np.random.Generator) -> Asked:
    """Go on with further seeds until it fits."""
    campaign = made_campaign(random, 5)
    counts = (5, 6, 8, 11, 15, MOST)
    return campaign, [Look(campaign.runs(range(1, n + 1))) for n in counts]


def leaves_pairs_out(random: np.random.Generator) -> Asked:
    """Leave out the pair that fits least."""
    campaign = made_campaign(random, 7)
    subsets = [pairs for n in (7, 6) for pairs in combinations(range(1, 8), n)]
    return campaign, [Look(campaign.runs(pairs)) for pairs in subsets]


def changes_match(random: np.random.Generator) -> Asked:
    """Try every measure."""
    campaign = made_campaign(random, 5)
    return campaign, [Look(campaign.runs(range(1, 6)), match) for match in MEASURES]


def changes_subject(random: np.random.Generator) -> Asked:
    """Name a subject, which lets other runs in, and compare these."""
    campaign = made_campaign(random, 5)
    looks = [Look(campaign.runs(range(1, 6)))]
    for n in (1, 2, 3):
        runs = campaign.runs(range(5 * n + 1, min(MOST, 5 * n + 5) + 1))
        looks += [Look(runs, subjects=["model.num_layers"]), Look([*looks[0].runs, *runs])]
    return campaign, looks


def picks_a_design(random: np.random.Generator) -> Asked:
    """Seal four designs, and compare each alone, so that nothing is corrected for the others."""
    designs = ("new", "newer", "newest", "other")
    campaign = made_campaign(random, 5, designs)
    each = [Look(campaign.runs(range(1, 6), [name])) for name in designs]
    return campaign, [*each, Look(campaign.runs(range(1, 6), designs))]


def makes_runs_again(random: np.random.Generator) -> Asked:
    """Train the worst run again with another frozen bank, under its name."""
    campaign = made_campaign(random, 5)
    runs = campaign.runs(range(1, 6))
    looks = [Look(runs)]
    for bank_seed in range(100, 105):
        place = int(random.integers(5, 10))
        loss = runs[place].result.validation_loss or 0.0
        again = made_run(
            "new", runs[place].seed, loss + SD * float(random.standard_normal()), bank_seed
        )
        runs = [*runs[:place], again, *runs[place + 1 :]]
        looks.append(Look(runs))
    return campaign, looks


def peeks_at_a_trial(random: np.random.Generator) -> Asked:
    """Compare the runs of a trial after each pair."""
    campaign = made_campaign(random, MOST, trial=True)
    return campaign, [Look(campaign.runs(range(1, n + 1))) for n in range(FEWEST_SEEDS, MOST + 1)]


def does_everything(random: np.random.Generator) -> Asked:
    """Add seeds, leave some out, and try every measure and a subject with each."""
    campaign = made_campaign(random, 6)
    looks = []
    for pairs in (range(1, 7), range(2, 7), range(1, 11), range(1, MOST + 1)):
        looks += [Look(campaign.runs(pairs), match) for match in MEASURES]
        looks.append(Look(campaign.runs(pairs), subjects=["model.num_layers"]))
    return campaign, looks


USERS: tuple[User, ...] = (
    adds_seeds,
    leaves_pairs_out,
    changes_match,
    changes_subject,
    picks_a_design,
    makes_runs_again,
    peeks_at_a_trial,
    does_everything,
)


def sealed_hit(campaign: Campaign, look: Look) -> bool:
    """Return whether `compare` calls a hypothesis a HIT that is sealed.

    Args:
        campaign: with the seal.
        look: what is asked.
    """
    said = verdicts(
        campaign.seal,
        look.runs,
        lambda design, baseline, _: campaign.gap(design, baseline, look.match),
        asked=(look.match, look.subjects),
    )
    return "': HIT" in said


def plain_hit(campaign: Campaign, look: Look) -> bool:
    """Return whether the ordinary interval of all runs given shows a hypothesis.

    Args:
        campaign: with the hypotheses.
        look: what is asked.
    """
    for claim in campaign.seal.sealed.hypotheses:
        sides: dict[str, dict[int, float]] = {claim.design: {}, claim.baseline: {}}
        for run in look.runs:
            if run.variant in sides:
                sides[run.variant][run.seed] = campaign.loss(run, look.match)
        own, base = sides[claim.design], sides[claim.baseline]
        differences = [own[seed] - base[seed] for seed in own]
        if len(differences) < FEWEST_SEEDS:
            continue
        half = _QUANTILES[len(differences)] * np.std(differences, ddof=1)
        mean = float(np.mean(differences))
        ends = (
            mean - half / math.sqrt(len(differences)),
            mean + half / math.sqrt(len(differences)),
        )
        if claim.answer(ends, ends) == "yes":
            return True
    return False


def _name(user: User) -> str:
    return str(getattr(user, "__name__", user))


def simulate(
    campaigns: int, users: Sequence[User] = USERS, seed: int = 1
) -> dict[str, list[tuple[bool, bool]]]:
    """Return {user: for each campaign, whether there was a sealed HIT, and a plain one}.

    Args:
        campaigns: number of all users' campaigns together.
        users: who make them, in turns.
        seed: where chance comes from.
    """
    random = np.random.default_rng(seed)
    found: dict[str, list[tuple[bool, bool]]] = {_name(user): [] for user in users}
    for number in range(campaigns):
        user = users[number % len(users)]
        campaign, looks = user(random)
        sealed = any(sealed_hit(campaign, look) for look in looks)
        plain = any(plain_hit(campaign, look) for look in looks)
        found[_name(user)].append((sealed, plain))
    return found


def main() -> int:
    """Print the shares, and return the exit code."""
    parser = argparse.ArgumentParser(description="Wrong HITs of users who move what they can.")
    parser.add_argument("--campaigns", type=int, default=CAMPAIGNS)
    campaigns = parser.parse_args().campaigns
    found = simulate(campaigns)
    everything = [hits for of_user in found.values() for hits in of_user]
    print(f"{'user':<20} campaigns  wrong, sealed  wrong, ordinary interval")
    for name, hits in (*found.items(), ("all", everything)):
        sealed, plain = (sum(hit[which] for hit in hits) / max(1, len(hits)) for which in (0, 1))
        print(f"{name:<20} {len(hits):>9}  {100 * sealed:>12.1f}%  {100 * plain:>23.1f}%")
    wrong = sum(sealed for sealed, _ in everything) / max(1, len(everything))
    print(
        f"wrong HITs under seal: {100 * wrong:.1f} % of {campaigns} campaigns (bar {100 * BAR:g} %)"
    )
    return int(wrong > BAR)


if __name__ == "__main__":
    sys.exit(main())
