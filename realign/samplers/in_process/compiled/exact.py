"""`ExactModel`: sampling and training compute the same log-probs bit for bit, with the library of `decode_step.cpp`.

A sum of floats depends on its order, and torch chooses the order of a matrix product by the number of rows. A decode
step and a training pass therefore differ by about 1e-6. In the library a row's sums have one order whatever the other
rows are. So rollouts use it for prompts, decode steps and log-probs, and scoring passes use it too. A training pass
also runs the layers of torch, for their gradient, and uses the library's values.

Shapes: R rows of a pass, N tokens, H hidden size, V vocabulary, Hk key-value heads, D head size, P tokens of a text.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from realign.errors import ConfigError
from realign.functional.logprobs import LMHead
from realign.functional.rounding import no_rounding
from realign.models.network.decoder import PackedCache, PackedDecoder, Text
from realign.models.network.images import PromptInput, ids_of
from realign.models.network.kv_cache import KVCache
from realign.models.network.network import Network
from realign.models.network.passes import Layout
from realign.samplers.in_process.compiled.fusion import Fusion
from realign.samplers.in_process.compiled.library import LibraryError, load_library
from realign.samplers.in_process.compiled.trunk import CompiledTrunk, Form, StoredLinear


class ExactModel:
    """The layers and the head of a network, computed by the library. `Network.exact` uses it in all passes."""

    def __init__(self, network: Network, fusion: Fusion | None) -> None:
        """Check that the library can compute this network.

        Args:
            network: the network.
            fusion: reads its weights; it requires the library.

        Raises:
            ConfigError: it cannot.
        """
        self._where = f"models.{network.name}.sampler.exact=true"
        obstacles = {
            "fused_rollout=false, load_in_4bit=true or an encoder-decoder model": fusion is None,
            "a device other than a CPU": network.device.type != "cpu",
            "dropout": network.draws,
            "a value head with layers": network.value_head is not None and network.value_head.branch is not None,
            "several ranks": network.rollout_module is not network.module,
        }
        if obstacle := next((name for name, is_there in obstacles.items() if is_there), None):
            raise ConfigError(f"{self._where}: incompatible with {obstacle}.")
        assert fusion is not None
        self._fusion = fusion
        fusion.path.required_by, fusion.path.cure = "exact=true", "exact=false"
        self._network = network
        self._length = 1
        self.read()
        self.head(self._network_head())

    def read(self, length: int = 1) -> CompiledTrunk:
        """Copy the current weights of the layers and the head, for texts of up to `length` tokens."""
        self._length = max(self._length, length)
        try:
            with no_rounding():  # also with dtype=bfloat16, whose gradient has rounded weights
                trunk = self._fusion.trunk(self._length, torch.float32)
        except ConfigError as error:
            raise ConfigError(f"models.{self._network.name}.{error}") from error
        assert isinstance(trunk, CompiledTrunk)  # raises otherwise, since it is required
        self._trunk = trunk
        self._head = ExactHead(self._network_head().weight_VH)
        return trunk

    def _network_head(self) -> LMHead:
        head = self._network.head
        assert isinstance(head, LMHead)  # `Network.fuses`
        return self._network.limit_head(head)

    def hidden(self, ids_R: Tensor, layout: Layout) -> Tensor:
        """Return the last hidden states [R, H] of a pass, with the weights of the last `read`; thread-safe."""
        return self._trunk.texts(ids_R, layout.pieces.tolist(), layout.after.tolist())[0]

    def head(self, head: LMHead) -> LMHead:
        """Return the head with products and log-probs by the library.

        Raises:
            ConfigError: the head has more than a weight.
        """
        if head.bias_V is not None or head.scale != 1 or head.softcap is not None:
            raise ConfigError(f"{self._where}: the head has a bias, a scale or a softcap.")
        # one copy for all micro-batches of a step: the weights don't change between `read` and the last of them
        return replace(head, exact=self._head if self._head.is_of(head.weight_VH) else ExactHead(head.weight_VH))

    def decoder(self, length: int) -> ExactDecoder:
        """Return the decoder of a rollout with the current weights, for `length` positions."""
        return ExactDecoder(self.read(length))


class ExactDecoder(PackedDecoder):
    """Reads prompts and decodes with the library, whatever the number of rows."""

    def __init__(self, trunk: CompiledTrunk) -> None:
        super().__init__(trunk)
        self._compiled = trunk

    @override
    def prefill(self, texts: Sequence[PromptInput]) -> tuple[Tensor, list[Any]]:
        read = [self._compiled.texts(ids_of(text), [len(text)], [-1]) for text in texts]
        return torch.stack([hidden_PH[-1] for hidden_PH, _ in read]), [Text(kv, {}) for _, kv in read]

    @override
    def step(self, cache: PackedCache, tokens_B: Tensor, positions_B: Tensor, longest: int) -> Tensor:
        assert isinstance(cache.kv, KVCache)
        return self._compiled.decode(tokens_B, positions_B, cache.kv, torch.get_num_threads())


class ExactHead:
    """Products with the weight of a head, and log-probs, with sums in a fixed order."""

    def __init__(self, weight_VH: Tensor) -> None:
        library = load_library()
        assert not isinstance(library, LibraryError)  # `ExactModel.read` needs it too
        self._library: ctypes.CDLL = library
        self._memory = (weight_VH.data_ptr(), weight_VH.shape)
        self._weight = StoredLinear.of(library, Form.floats, weight_VH)

    def is_of(self, weight_VH: Tensor) -> bool:
        """Return whether it was copied from the memory of this weight."""
        return self._memory == (weight_VH.data_ptr(), weight_VH.shape)

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Return the product [N, V] with the weight."""
        return self._weight.product(hidden_NH, 1)

    def logprobs(self, logits_NV: Tensor, tokens_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probs [N] of tokens under the softmax of logits, and the log-sum-exp [N]."""
        logits_NV, tokens_N = logits_NV.contiguous(), tokens_N.contiguous()
        logprobs_N, normalizer_N = torch.empty(len(tokens_N)), torch.empty(len(tokens_N))
        self._library.realign_logprobs(
            len(tokens_N),
            logits_NV.data_ptr(),
            logits_NV.shape[1],
            tokens_N.data_ptr(),
            logprobs_N.data_ptr(),
            normalizer_N.data_ptr(),
        )
        return logprobs_N, normalizer_N
