"""Sample responses from a transformers model, with the modules and attention function of the training model.

Sequences are decoded in slots of a static cache. Between two steps, waiting sequences replace finished ones, so a
long response does not block the others. Each prompt is prefilled once for all its responses.

Shapes: S sequences (responses), N tokens of the longest response, T packed tokens of the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from realign.api.generation import GenerationConfig
from realign.api.lengths import Lengths
from realign.api.router_experts import with_experts
from realign.api.sample import PIXELS, SequenceSample, with_response_index
from realign.api.sampling_mask import with_masks
from realign.errors import ConfigError, DataError, RunError
from realign.functional.packed import cu_seqlens_of, position_ids, sequence_index
from realign.models.network.images import CURE, NO_IMAGES, ImageInputs, ImagePrompt, PromptInput, prompts_with_images
from realign.samplers.in_process.decode import Responses, Rollout, Stopping
from realign.samplers.in_process.draw import response_keys
from realign.samplers.in_process.rollout_model import Cores, RolloutModel, frozen_casts_kept, positions_of
from realign.samplers.in_process.settings import InProcessSampling

PROMPTS = "prompt_ids"


@torch.no_grad()
def generate(
    model: RolloutModel,
    data: SequenceSample,
    config: GenerationConfig,
    sampling: InProcessSampling,
    *,
    seed: int,
    eos_token_ids: Sequence[int],
    tokenizer: Any,
) -> SequenceSample:
    """Sample `config.n` responses for each prompt; implements `PipelinableEngine.generate`.

    The same arguments and weights give bitwise identical results. Batching affects only the rounding of logits, since
    the random number of a token depends only on seed, id, response and position. A slot holds the longest prompt and
    `max_new_tokens`.

    Args:
        model: the model.
        data: batch with the key `prompt_ids`, one non-empty sequence per id, and the images of the prompts, if any.
        config: sampling settings; the model's own generation settings are ignored.
        sampling: settings of the sampler.
        seed: seed of this call.
        eos_token_ids: the model's end tokens, used if `config.stop_token_ids` is None.
        tokenizer: decodes responses for `config.stop_strings`; otherwise unused.

    Returns:
        The same ids, each with its `n` sequences:

        - `input_ids`: prompt and response, including the stop token;
        - `prompt_mask` and `loss_mask` (the response);
        - `logprobs`: fp32, 0 on the prompt;
        - `truncated`: [S] bool, True if the length limit ended the response (always False with `fixed_length`);
        - `response_index`: [S], which of the `n` responses it is;
        - `router_experts`: the experts that `model.routers` chose, if given; see `realign.api.router_experts`;
        - `sampling_mask`: with `config.sampling_replay`; see `realign.api.sampling_mask`.

    Raises:
        ValueError: an id does not have exactly one prompt.
        DataError: a prompt is empty, has tokens outside the vocabulary, or does not fit its images, or prompt and
            response exceed the model's positions.
        ConfigError: stop settings are invalid, or the model does not read images.
        RunError: a log-prob is not finite.
    """
    prompts = check_prompts(model.module, data, config, model.images)
    length = int(data.lengths[PROMPTS].flat.max(initial=0)) + config.max_new_tokens
    with ExitStack() as stack:
        stack.enter_context(_evaluating(model.module))
        stack.enter_context(frozen_casts_kept(model.module))
        cores = Cores(model.module)
        stack.callback(cores.give_back)
        decoder, head = model.prepare(length, cores)
        device = head.weight_VH.device
        stopping = Stopping(config, eos_token_ids, tokenizer, len(head.weight_VH), device)
        rollout = Rollout(decoder, head, config, stopping, sampling)
        sequences_S = rollout.add([p.to(device) for p in prompts], response_keys(seed, data.ids, config.n))
        responses = rollout.run()
    out = pack_responses(data, responses, config.n)
    if rollout.masks is not None:
        out = with_masks(out, rollout.masks.of(sequences_S.tolist()))
    if rollout.experts is None:
        return out
    return with_experts(out, rollout.experts.of(sequences_S.tolist(), responses.lengths.tolist()))


def check_prompts(
    model: Any, data: SequenceSample, config: GenerationConfig, images: ImageInputs | None
) -> list[PromptInput]:
    """Return the prompts, one per id.

    Raises:
        ValueError: an id does not have exactly one prompt.
        DataError: `generate` does not support a prompt.
        ConfigError: a prompt has images, but `images` is None.
    """
    ids_T, lengths = data[PROMPTS], data.lengths[PROMPTS]
    for i, count in zip(data.ids, lengths.counts.tolist(), strict=True):
        if count != 1:
            raise ValueError(f"id {i!r} has {count} sequences of {PROMPTS!r}, but generation requires exactly one")
    limit = positions_of(model)
    for i, length in zip(data.ids, lengths.flat.tolist(), strict=True):
        if length == 0:
            raise DataError(f"id {i!r}: the prompt is empty. A prompt must have at least one token.")
        if limit is not None and length + config.max_new_tokens > limit:
            room = limit - length
            cure = f"Set max_new_tokens to at most {room}." if room > 0 else "Filter longer prompts."
            raise DataError(
                f"id {i!r}: a prompt of {length} tokens plus max_new_tokens={config.max_new_tokens} exceeds the "
                f"context window of the model ({limit}). {cure}"
            )
    words = len(model.get_input_embeddings().weight)
    for i, prompt in zip(data.ids, data.sequences(PROMPTS), strict=True):
        if len(ids_T) and not (int(prompt.min()) >= 0 and int(prompt.max()) < words):
            raise DataError(
                f"id {i!r}: the prompt has token ids from {int(prompt.min())} to {int(prompt.max())}, but the model "
                f"has 0 to {words - 1}. Use the tokenizer of the model."
            )
    return _with_images(data, images)


def _with_images(data: SequenceSample, images: ImageInputs | None) -> list[PromptInput]:
    if images is None and PIXELS in data and len(data[PIXELS]):
        raise ConfigError(NO_IMAGES)
    prompts = prompts_with_images(data, PROMPTS)
    for i, prompt in zip(data.ids, prompts, strict=True):
        if images is not None and isinstance(prompt, ImagePrompt):
            try:
                images.check(prompt)
            except ValueError as error:
                raise DataError(f"id {i!r}: {error}. {CURE}") from error
    return prompts


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode, and restore the mode of every module on exit."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def check_logprobs(logprobs: Tensor) -> None:
    """Check that sampled log-probs are finite.

    Raises:
        RunError: a log-prob is not finite.
    """
    if not bool(logprobs.isfinite().all()):
        raise RunError(
            "A sampled log-prob is not finite, so the weights or hidden states are not finite. "
            "Lower optimizer.lr, or resume from an earlier checkpoint."
        )


def pack_responses(data: SequenceSample, responses: Responses, n: int) -> SequenceSample:
    """Pack prompts and responses, n sequences per id, on the device of the prompts; see `generate`."""
    check_logprobs(responses.logprobs)
    device = data[PROMPTS].device
    tokens_SN, logprobs_SN, counts_S, truncated_S = (x.to(device) for x in responses)
    prompts_S = torch.from_numpy(data.lengths[PROMPTS].flat.repeat(n)).to(device)
    lengths = Lengths.of((prompts_S + counts_S).view(-1, n).tolist())
    cu_seqlens = cu_seqlens_of(prompts_S + counts_S)
    prompt_mask_T = position_ids(cu_seqlens) < prompts_S[sequence_index(cu_seqlens)]
    sampled_SN = torch.arange(tokens_SN.shape[1], device=device) < counts_S[:, None]
    repeated = [prompt for prompt in data.sequences(PROMPTS) for _ in range(n)]
    ids_T = torch.empty(lengths.total, dtype=torch.int64, device=device)
    # `ids_T[:0]`, since a batch without prompts has nothing to join
    ids_T[prompt_mask_T] = torch.cat([ids_T[:0], *repeated])
    ids_T[~prompt_mask_T] = tokens_SN[sampled_SN]
    logprobs_T = torch.zeros(lengths.total, device=device)
    logprobs_T[~prompt_mask_T] = logprobs_SN[sampled_SN]
    keys = {"input_ids": ids_T, "prompt_mask": prompt_mask_T, "loss_mask": ~prompt_mask_T, "logprobs": logprobs_T}
    out = SequenceSample(data.ids).with_data(keys, lengths=lengths).with_sequences(truncated=truncated_S)
    return with_response_index(out)
