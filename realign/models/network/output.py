"""Output of one packed forward pass for losses and post-hooks, computed from hidden states on demand.

Shapes: T packed tokens, R rows of the pass (fewer than T if tokens share rows), S sequences, N selected tokens, H
hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from realign.api.engine import QValues
from realign.api.sample import on_device
from realign.functional.logprobs import LMHead, Support, no_autocast, token_logprobs, vocabulary_divergence
from realign.functional.packed import position_ids
from realign.models.host import Host


@dataclass(frozen=True, eq=False)
class ScalarHead:
    """Last layer of a reward model or critic: one number per hidden state, computed in fp32."""

    weight_1H: Tensor
    bias_1: Tensor | None = None
    dropout: float = 0.0
    """Dropout probability of the entries of the hidden state."""

    def __call__(self, hidden_NH: Tensor) -> Tensor:
        """Return one number per hidden state, [N] fp32."""
        bias_1 = None if self.bias_1 is None else self.bias_1.float()
        with no_autocast(hidden_NH):
            inputs_NH = F.dropout(hidden_NH.float(), self.dropout)  # `read_head` sets a rate for training passes only
            return F.linear(inputs_NH, self.weight_1H.float(), bias_1)[:, 0]


@dataclass(frozen=True, eq=False)
class ScalarBranch:
    """A scalar head of a model that also has a language-model head."""

    hidden: Callable[[], Tensor]
    """Returns the input [R, H] of the head; called at most once, when values or scores are needed."""
    head: Callable[[Tensor], Tensor]
    """Maps hidden states [N, H] to numbers [N] fp32."""
    q_values: Callable[[Tensor, Tensor], QValues] | None = None
    """Maps hidden states [N, H] and the tokens [N] after them to action values; None without Q heads."""


@dataclass(frozen=True, eq=False)
class RowsOfRank:
    """The rows of a pass that this process computes, if several divide it.

    Results per token are small, so each process adds those of the others to its own. All of them then compute the same
    loss, whose gradient each passes on to its own rows: together they differentiate it once.
    """

    own: range
    """The rows, of which `PackedOutput.hidden_RH` has the hidden states."""
    total: int
    """Number of rows of all processes."""
    predicted_T: Tensor
    """[T] whether the row of the token before each token is one of them, on the host."""
    sum: Callable[[Tensor], Tensor]
    """Adds a tensor over the processes. Its gradient is that of this process's result."""


@dataclass(frozen=True, eq=False)
class PackedOutput:
    """Implements `realign.api.ModelOutput` over the hidden states of a packed forward pass.

    Attributes:
        hidden_RH: last hidden states of the R computed rows, after the model's final norm.
        head: maps hidden states to logits (`LMHead`) or to one number (`ScalarHead`).
        input_ids_T: the input tokens.
        cu_seqlens: int32 [S + 1] boundaries of the sequences; on the host they need no device sync.
        autocast: returns the context for branches and the language-model head; later computations use fp32.
        branch: computes the values and scores of a language model with a value head.
        row_T: the row of each token, if tokens share rows; None means that token t has row t.
        heads: the language-model heads of other roles, for `divergence`.
        predicted_T: the tokens that the model predicts, on the host; None means all but first tokens. Results are 0
            for other tokens.
        masks: pairs of a mask of the micro-batch on its device, and the same mask on the host. Selecting the tokens of
            such a mask needs no device sync.
        host: counts the selected tokens.
        support: the tokens of the vocabulary that the sampler kept when it drew each token; see
            `realign.api.sampling_mask`.
        rank: the rows in `hidden_RH`, if they are not all.
    """

    hidden_RH: Tensor
    head: LMHead | ScalarHead
    input_ids_T: Tensor
    cu_seqlens: Tensor
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    branch: ScalarBranch | None = None
    row_T: Tensor | None = None
    heads: Mapping[str, LMHead] = field(default_factory=dict)
    predicted_T: Tensor | None = None
    masks: Sequence[tuple[Tensor, Tensor]] = ()
    host: Host = field(default_factory=Host)
    support: Support | None = None
    rank: RowsOfRank | None = None

    @property
    def hidden_TH(self) -> Tensor:
        """Last hidden states of all tokens."""
        return self._spread(self._all_rows(self.hidden_RH))

    def logprobs(self, *, temperature: float = 1.0, where_T: Tensor | None = None) -> Tensor:
        """See `ModelOutput.logprobs`. The head is computed only for the tokens in `where_T`.

        A `where_T` on a CUDA device causes one device sync, unless it is a mask of the micro-batch.
        """
        return self._token_values(temperature, where_T, with_entropy=False)[0]

    def logprobs_and_entropy(self, *, temperature: float = 1.0, where_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `ModelOutput.logprobs_and_entropy`; both are 0 at first tokens and outside `where_T`."""
        logprobs_T, entropy_T = self._token_values(temperature, where_T, with_entropy=True)
        assert entropy_T is not None
        return logprobs_T, entropy_T

    @property
    def lm_head(self) -> LMHead:
        """See `ModelOutput.lm_head`."""
        return self._language_head("lm_head").complete()

    def hidden_states(self, *, where_T: Tensor | None = None) -> Tensor:
        """See `ModelOutput.hidden_states`."""
        tokens_N = self._here(self._tokens(where_T))
        states_NH = self.hidden_RH[self._rows(tokens_N - 1)]
        zeros_TH = states_NH.new_zeros(len(self.input_ids_T), states_NH.shape[1])
        return self._of_all(zeros_TH.index_put((tokens_N,), states_NH))

    def divergence(
        self,
        role: str,
        hidden_TH: Tensor,
        *,
        beta: float = 1.0,
        temperature: float = 1.0,
        where_T: Tensor | None = None,
    ) -> Tensor:
        """See `ModelOutput.divergence`. The heads are computed only for the tokens in `where_T`."""
        if role not in self.heads:
            raise ValueError(f"no head of role {role!r}: the engine has those of {sorted(self.heads)} (`use_heads`)")
        support, tokens_N = self._support_and_tokens(where_T)
        with self.autocast():
            divergence_N = vocabulary_divergence(
                self.hidden_RH[self._rows(tokens_N - 1)],
                self._language_head("divergence").complete(),
                # the other role stores a state at the token that it predicts; ours is one token earlier
                hidden_TH[tokens_N],
                self.heads[role],
                beta=beta,
                temperature=temperature,
                support=support,
            )
        return self._of_all(divergence_N.new_zeros(len(self.input_ids_T)).index_put((tokens_N,), divergence_N))

    @property
    def logits(self) -> Tensor:
        """See `ModelOutput.logits`."""
        with self.autocast():
            return self._spread(self._all_rows(self._language_head("logits").complete().logits(self.hidden_RH)))

    def values(self) -> Tensor:
        """See `ModelOutput.values`."""
        read_RH, head = self._scalar("values")
        if not len(read_RH):
            return read_RH.new_zeros(0, dtype=torch.float32)
        after_T = self._spread(self._all_rows(head(read_RH)))
        # the state before token t is the one after token t - 1; first tokens, where sequences would mix, get 0
        return after_T.roll(1).masked_fill(self._here(~self._asked_T), 0.0)

    def scores(self) -> Tensor:
        """See `ModelOutput.scores`. The last token is determined by sequence lengths, not by token ids."""
        read_RH, head = self._scalar("scores")
        empty_S = self._here(self.cu_seqlens.diff() == 0)
        if not len(read_RH):
            return read_RH.new_zeros(len(empty_S), dtype=torch.float32)
        # an empty sequence has no last token: it reads any row, and gets 0
        last_S = self._here((self.cu_seqlens[1:].long() - 1).clamp(min=0))
        row_S, unknown_S = self._rows(last_S), empty_S
        if self.rank is not None:  # another process may compute the row
            unknown_S = empty_S | (row_S < 0) | (row_S >= len(read_RH))
            row_S = row_S.clamp(0, len(read_RH) - 1)
        return self._of_all(head(read_RH[row_S]).masked_fill(unknown_S, 0.0))

    def q_values(self, *, where_T: Tensor | None = None) -> QValues:
        """See `ModelOutput.q_values`. The heads are computed only for the tokens in `where_T`."""
        if self.branch is None or self.branch.q_values is None:
            raise ValueError("q_values requires Q heads (head.value_head.q_heads), but this model has none")
        tokens_N = self._here(self._tokens(where_T))
        values = self.branch.q_values(self._branch_RH[self._rows(tokens_N - 1)], self.input_ids_T[tokens_N])
        zeros_T = torch.zeros(len(self.input_ids_T), device=tokens_N.device)
        return QValues(*(self._of_all(zeros_T.expand(*x.shape[:-1], -1).index_copy(-1, tokens_N, x)) for x in values))

    def _here(self, x: Tensor) -> Tensor:
        return on_device(x, self.hidden_RH.device)

    def _rows(self, tokens_N: Tensor) -> Tensor:
        """Return the places of the given tokens in `hidden_RH`."""
        row_N = tokens_N if self.row_T is None else self.row_T[tokens_N]
        return row_N if self.rank is None else row_N - self.rank.own.start

    def _all_rows(self, x_R: Tensor) -> Tensor:
        """Return the entries of the rows of all processes, given those of this one."""
        if self.rank is None:
            return x_R
        around = (self.rank.own.start, self.rank.total - self.rank.own.stop)
        return self.rank.sum(F.pad(x_R, (*(0, 0) * (x_R.ndim - 1), *around)))

    def _of_all(self, x: Tensor) -> Tensor:
        """Return the results of all processes, given those of this one, which are 0 where another computes them."""
        return x if self.rank is None else self.rank.sum(x)

    def _spread(self, x_R: Tensor) -> Tensor:
        """Expand one entry per row to one entry per token."""
        return x_R if self.row_T is None else x_R[self.row_T]

    @cached_property
    def _asked_T(self) -> Tensor:
        """The tokens that have a prediction."""
        follows_T = position_ids(self.cu_seqlens, len(self.input_ids_T)) > 0
        return follows_T if self.predicted_T is None else follows_T & self.predicted_T.to(follows_T.device)

    def _token_values(
        self, temperature: float, where_T: Tensor | None, *, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-probs [T] and entropies [T]; the head is applied one position before each requested token."""
        head = self._language_head("logprobs")
        support, tokens_N = self._support_and_tokens(where_T)
        with self.autocast():
            logprobs_N, entropy_N = token_logprobs(
                self.hidden_RH[self._rows(tokens_N - 1)],
                head,
                self.input_ids_T[tokens_N],
                temperature=temperature,
                with_entropy=with_entropy,
                support=support,
            )
        zeros_T = logprobs_N.new_zeros(len(self.input_ids_T))
        given = (logprobs_N, entropy_N)
        spread = (None if x is None else self._of_all(zeros_T.index_put((tokens_N,), x)) for x in given)
        logprobs_T, entropy_T = spread
        assert logprobs_T is not None
        return logprobs_T, entropy_T

    def _support_and_tokens(self, where_T: Tensor | None) -> tuple[Support | None, Tensor]:
        """Return the sets that the distributions of the tokens in `where_T` are normalized over, and the tokens."""
        tokens_N = self._tokens(where_T)
        return None if self.support is None else self.support.take(tokens_N.cpu()), self._here(tokens_N)

    def _tokens(self, where_T: Tensor | None) -> Tensor:
        """Return the indices of the tokens in `where_T` that this process predicts; on the host, if `where_T` is."""
        asked_T = self._asked_T
        if self.rank is not None:
            asked_T = on_device(asked_T, self.rank.predicted_T.device) & self.rank.predicted_T
        if where_T is not None:
            if where_T.shape != asked_T.shape or where_T.dtype != torch.bool:
                raise ValueError(
                    f"where_T has dtype {where_T.dtype} and shape {list(where_T.shape)}. "
                    f"It must be bool of shape {list(asked_T.shape)}."
                )
            # the number of selected tokens is the shape of the results, so the host has to count them
            # by identity, since comparing the contents would wait for the device
            host_T = next((host_T for device_T, host_T in self.masks if device_T is where_T), where_T)
            asked_T = on_device(asked_T, host_T.device) & host_T
        return self.host.true_indices(asked_T)

    def _language_head(self, asked: str) -> LMHead:
        if not isinstance(self.head, LMHead):
            raise ValueError(f"{asked} requires a language model (head=causal), but this model has a scalar head")
        return self.head

    def _scalar(self, asked: str) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the input [R, H] of the scalar head, and the head."""
        if isinstance(self.head, ScalarHead):
            return self.hidden_RH, self.head
        if self.branch is None:
            raise ValueError(
                f"{asked} requires a scalar head (head=score, head=value or a value_head), but this model has none"
            )
        return self._branch_RH, self.branch.head

    @cached_property
    def _branch_RH(self) -> Tensor:
        assert self.branch is not None
        with self.autocast():
            return self.branch.hidden()
