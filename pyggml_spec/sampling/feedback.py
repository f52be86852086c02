"""Samplers that choose by the probability of what was chosen before: mirostat and adaptive-p.

libllama's draw with random numbers of their own and learn from that draw. Here libllama cuts or weighs the tokens, by a sampler whose state is set to this one's, and the
draw is ours. State is F32, as there.
"""

import math
from typing import Any

import numpy as np

from ..ggml.library import ffi, lib

MIROSTAT_TOKENS = 100  # from which version 1 estimates the distribution, as in llama.cpp


class Mirostat:
    """Keeps tokens of a surprise that moves towards ``mirostat_tau`` bits."""

    def __init__(self, sampling: Any, n_vocab: int) -> None:
        self._n_vocab, self._version = n_vocab, sampling.mirostat
        self._tau, self._eta = np.float32(sampling.mirostat_tau), np.float32(sampling.mirostat_eta)
        self._most = 2 * self._tau  # surprise of a kept token, in bits

    def apply(self, array: Any) -> None:
        """Leaves the tokens that may be chosen in ``array`` (llama_token_data_array), with their probabilities."""
        tau = float(self._most / 2)  # whose double is where libllama begins
        made = (
            lib.llama_sampler_init_mirostat_v2(0, tau, 0)
            if self._version == 2
            else lib.llama_sampler_init_mirostat(self._n_vocab, 0, tau, 0, MIROSTAT_TOKENS)
        )
        lib.llama_sampler_apply(made, array)
        lib.llama_sampler_free(made)

    def chose(self, index: int, left: np.ndarray) -> None:
        """Learns from a draw, also from one that a constraint refuses, as libllama does."""
        probability = float(left["p"][index])
        surprise = np.float32(-math.log2(probability)) if probability > 0 else np.float32(np.inf)
        self._most -= self._eta * (surprise - self._tau)

    def accept(self) -> None:
        pass

    def close(self) -> None:
        pass


class AdaptiveP:
    """Weighs tokens by how near their probability is to a target, which moves so that the average of the chosen ones meets ``adaptive_target``."""

    def __init__(self, sampling: Any) -> None:
        self._target, self._decay = np.float32(sampling.adaptive_target), np.float32(sampling.adaptive_decay)
        self._sum, self._weight = self._target / (1 - self._decay), 1 / (1 - self._decay)
        self._softmax = lib.llama_sampler_init_adaptive_p(-1, 0, 0)  # whose negative target leaves the logits as they are
        self._before = np.zeros(0, np.float32)
        self._pending: np.float32 | None = None

    def apply(self, array: Any) -> None:
        """Sets the logits of the tokens in ``array`` (llama_token_data_array)."""
        lib.llama_sampler_apply(self._softmax, array)
        data = np.frombuffer(ffi.buffer(array.data, array.size * ffi.sizeof("llama_token_data")), np.float32)
        self._before = data.reshape(-1, 3)[:, 2].copy()  # their probabilities
        target = np.clip(2 * self._target - self._sum / self._weight, np.float32(0), np.float32(1))
        made = lib.llama_sampler_init_adaptive_p(float(target), 0, 0)  # without a decay its target stays what it is
        lib.llama_sampler_apply(made, array)
        lib.llama_sampler_free(made)

    def chose(self, index: int, left: np.ndarray) -> None:
        self._pending = self._before[index]

    def accept(self) -> None:
        """Learns from the last draw, once it is the next token."""
        if self._pending is not None:
            self._sum, self._weight = self._pending + self._decay * self._sum, 1 + self._decay * self._weight
            self._pending = None

    def close(self) -> None:
        lib.llama_sampler_free(self._softmax)
