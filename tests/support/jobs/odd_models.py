"""Models and data that cannot be used, for the sentences that say so."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from support.jobs.own_models import VOCABULARY, Logits, Wide
from torch import Tensor, nn

from unskew.runtime.model.own_shards import ColumnCut, Sharding


class Odd(Wide):
    """`gives`: what becomes of its output."""

    def __init__(self, gives: Callable[[Tensor], Tensor]) -> None:
        super().__init__(16)
        self._gives = gives

    def forward(self, x: Tensor) -> Tensor:
        return self._gives(super().forward(x))


class OddLoss(Logits):
    def __init__(self, loss: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.loss = loss

    def shards(self) -> dict[str, Sharding]:
        return {}


class NeverSummed(Wide):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))  # type: ignore[no-any-return]

    def shards(self) -> dict[str, Sharding]:
        return {"down": ColumnCut(4)}


class Unnamed(Wide):
    def shards(self) -> dict[str, Sharding]:
        return self.missing  # type: ignore[no-any-return]


def _of(*layers: nn.Module) -> list[nn.Module]:
    return [nn.Embedding(VOCABULARY, 16), *layers]


def unchained() -> list[nn.Module]:
    return _of(nn.Linear(16, 24), Logits())


def few_logits() -> list[nn.Module]:
    return _of(nn.Linear(16, 8))


def loss_of_each() -> list[nn.Module]:
    return _of(OddLoss(lambda y, _: y.sum(1)))


def no_number() -> list[nn.Module]:
    return _of(Odd(lambda x: x * float("nan")), Logits())


def constant_loss() -> list[nn.Module]:
    return _of(OddLoss(lambda y, _: y.detach().sum()))


def all_frozen() -> list[nn.Module]:
    return [layer.requires_grad_(False) for layer in _of(nn.Linear(16, VOCABULARY))]


def never_summed() -> list[nn.Module]:
    return _of(NeverSummed(16), Logits())


def unnamed_shards() -> list[nn.Module]:
    return _of(Unnamed(16), Logits())


def ends() -> list[nn.Module]:
    raise SystemExit(3)


def detached() -> list[nn.Module]:
    return _of(Odd(Tensor.detach), Wide(16), Logits())


def first_frozen() -> list[nn.Module]:
    first = _of(Wide(16))
    return [*(layer.requires_grad_(False) for layer in first), Wide(16), Logits()]


def no_documents() -> None:
    """Forgets to return them."""


def numbers() -> Iterator[int]:
    return iter(range(1000))


def texts() -> Iterator[str]:
    return iter(["some text"] * 1000)


def fractions() -> Iterator[list[float]]:
    return iter([[1.5, 2.5]] * 1000)


def below_zero() -> Iterator[list[int]]:
    return iter([[1, -1]] * 1000)


def large() -> Iterator[list[int]]:
    return iter([[1, 256]] * 1000)


def one_id_each() -> Iterator[list[int]]:
    while True:
        yield [1]


def breaks() -> Iterator[list[int]]:
    yield [1, 2]
    raise OSError("the disk is gone")
