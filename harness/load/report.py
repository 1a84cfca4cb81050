"""What a load shows: throughput, latencies, and whether the client let the server show it."""

from __future__ import annotations

import dataclasses
from typing import Any

from harness.measure.endpoint import of_right_length
from harness.measure.load import MAX_WAIT_SHARE, ClosedLoop, Load, OpenLoop, Quantiles
from harness.verdict import Verdict

__all__ = ["Report"]

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Report:
    """One load on the server at `url`.

    `asked` is how many tokens each request asked for; with `ignore_eos` each answer must have so many.
    """

    url: str
    model: str
    arrival: ClosedLoop | OpenLoop
    asked: int
    ignore_eos: bool
    load: Load

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second of wall time."""
        return sum(each.tokens for each in self.load.requests) / self.load.seconds

    @property
    def latency(self) -> Quantiles | None:
        """From when a request was due until it was handled, in seconds."""
        return Quantiles.of(each.latency_s for each in self.load.requests)

    @property
    def first_token(self) -> Quantiles | None:
        """From when a request was due until its first token, in seconds; None if not streamed."""
        return Quantiles.of(
            each.late_s + each.first_token_s for each in self.load.requests if each.first_token_s is not None
        )

    @property
    def per_token(self) -> Quantiles | None:
        """Time between two tokens of a request, its mean, in seconds; None if not streamed."""
        return Quantiles.of(
            (each.seconds - (each.after_s or 0.0) - each.first_token_s) / (each.tokens - 1)
            for each in self.load.requests
            if each.first_token_s is not None and each.tokens > 1
        )

    @property
    def invalid(self) -> str:
        """Return why these figures may not be what the server can do, "" if they are.

        Each answer must have the tokens that were asked for: one that was cut is quick, and says nothing. Beside the
        limits of `Headroom`, the slowest requests must not be slow because of the client: the 99th percentile of the
        waits must be small against that of the latencies.
        """
        requests = self.load.requests
        cut = [each for each in requests if not of_right_length(each.tokens, self.asked, ignore_eos=self.ignore_eos)]
        if cut:
            return (
                f"{len(cut)} of {len(requests)} answers have not the tokens asked for: the first, to {cut[0].prompt!r}"
                f", has {cut[0].tokens}, expected {'' if self.ignore_eos else '1 to '}{self.asked}"
                + (" (a server that does not know ignore_eos needs --stop-at-eos)" if self.ignore_eos else "")
            )
        headroom = self.load.headroom
        if headroom.limit is not None:
            what, expected, actual = headroom.limit
            return f"{what}: {actual}, expected {expected}"
        wait = Quantiles.of(each.waited_s for each in self.load.requests if each.waited_s is not None)
        latency = self.latency
        if wait is None or latency is None or wait.p99 > MAX_WAIT_SHARE * latency.p99:
            seen = "nothing" if wait is None or latency is None else f"{wait.p99 / latency.p99:.1%} of the latency's"
            return (
                f"some requests waited long for the load client: the wait's 99th percentile is {seen}, "
                f"expected at most {MAX_WAIT_SHARE:.0%}"
            )
        return ""

    @property
    def verdict(self) -> Verdict:
        """PASS, or INVALID where answers were cut, or the client may have limited the figures."""
        return Verdict.INVALID if self.invalid else Verdict.PASS

    def as_data(self) -> dict[str, Any]:
        """Return everything, each request included, as docs/load.md describes it."""
        kind = "closed" if isinstance(self.arrival, ClosedLoop) else "open"
        quantiles = {"latency_s": self.latency, "first_token_s": self.first_token, "per_token_s": self.per_token}
        return {
            "schema": SCHEMA,
            "url": self.url,
            "model": self.model,
            "arrival": {"loop": kind, **dataclasses.asdict(self.arrival)},
            "max_tokens": self.asked,
            "ignore_eos": self.ignore_eos,
            "verdict": self.verdict,
            "invalid": self.invalid,
            "seconds": self.load.seconds,
            "tokens": sum(each.tokens for each in self.load.requests),
            "tokens_per_second": self.tokens_per_second,
            "requests_per_second": len(self.load.requests) / self.load.seconds,
            **{name: value and dataclasses.asdict(value) for name, value in quantiles.items()},
            "client_cpu_s": self.load.client_cpu_s,
            "headroom": dataclasses.asdict(self.load.headroom),
            "requests": [dataclasses.asdict(each) for each in self.load.requests],
        }

    def as_text(self) -> str:
        """Return a few lines for a person."""
        if isinstance(self.arrival, ClosedLoop):
            arrival = f"a closed loop of {self.arrival.concurrency}"
        else:
            arrival = f"an open loop of {self.arrival.rate:g} a second, seed {self.arrival.seed}"
        headroom = self.load.headroom
        waits = "not measured" if headroom.wait_share is None else f"{headroom.wait_share:.2%} of their time"
        lines = [
            ("verdict", f"{self.verdict}{f': {self.invalid}' if self.invalid else ''}"),
            (
                "load",
                f"{len(self.load.requests)} requests in {arrival}, {self.asked} tokens each, {self.load.seconds:.2f} s",
            ),
            ("tokens/s", f"{self.tokens_per_second:.1f}"),
            ("requests/s", f"{len(self.load.requests) / self.load.seconds:.2f}"),
            ("latency", _ms(self.latency)),
            ("first token", _ms(self.first_token)),
            ("per token", _ms(self.per_token)),
            ("client CPU", f"{headroom.client_share:.1%} of one core"),
            ("client wait", f"{waits}: {headroom.waits}"),
        ]
        return "".join(f"{name:<12}  {value}\n" for name, value in lines if value)


def _ms(times: Quantiles | None) -> str:
    if times is None:
        return ""
    return f"median {1e3 * times.median:.1f} ms, p99 {1e3 * times.p99:.1f}, max {1e3 * times.max:.1f}"
