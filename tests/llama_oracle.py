"""llama.cpp's own DFlash and MTP, driven through libllama: the oracles for drafted ids.

DFlash: the steps are those of common/speculative.cpp: verify a block on the target, hand the captured layer inputs of all its rows to the draft
context as embeddings, drop what was rejected from both memories, then decode [last, MASK ...] on the draft context and read each row's argmax.
The two layer-input functions are exported with C++ names only. Of architectures whose inputs llama.cpp does not hand out, the outputs of layers are
taken from what its scheduler shows of every node.
"""

import ctypes

import llama_cpp as L
import llama_cpp.llama_cpp_ext as X
import numpy as np
from llama_cpp.llama_cpp import _lib

from pyggml_spec.cache.kv import KVTypes
from pyggml_spec.ggml.library import ffi, lib
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.tools.reference import stacks_as_they_are

F16 = KVTypes()
HANDED_OUT = {  # architectures whose layer inputs the pinned llama.cpp hands to drafters
    "gemma4", "gpt-oss", "lfm2", "lfm2moe", "llama", "minimax-m2", "muse-glimmer", "nemotron_h", "nemotron_h_moe", "qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next",
}  # fmt: skip


class _Embd(ctypes.Structure):
    _fields_ = [("data", ctypes.POINTER(ctypes.c_float)), ("n_rows", ctypes.c_size_t), ("n_embd", ctypes.c_size_t)]


def _function(name, restype, *argtypes):
    fn = getattr(_lib, name)
    fn.restype, fn.argtypes = restype, list(argtypes)
    return fn


_ptr = ctypes.c_void_p
_set_layer_input = _function("_Z30llama_set_embeddings_layer_inpP13llama_contextjb", None, _ptr, ctypes.c_uint32, ctypes.c_bool)
_get_layer_input = _function("_Z30llama_get_embeddings_layer_inpP13llama_contextj", ctypes.POINTER(ctypes.c_float), _ptr, ctypes.c_uint32)
_ext_init = _function("llama_batch_ext_init", _ptr, _ptr)
_ext_free = _function("llama_batch_ext_free", None, _ptr)
_ext_clear = _function("llama_batch_ext_clear", None, _ptr)
_ext_add_embd = _function("llama_batch_ext_add_embd", ctypes.c_int32, _ptr, ctypes.c_int32, _Embd)
_ext_set_pos = _function("llama_batch_ext_set_pos", ctypes.c_bool, _ptr, ctypes.c_int32, ctypes.POINTER(ctypes.c_int32))
_process = _function("llama_process", ctypes.c_int32, _ptr, ctypes.c_int, _ptr)
_set_causal = _function("llama_set_causal_attn", None, _ptr, ctypes.c_bool)
_ext_add_token = _function("llama_batch_ext_add_token", ctypes.c_int32, _ptr, ctypes.c_int32, ctypes.c_int32)
_ext_set_embd = _function("llama_batch_ext_set_embd_token", ctypes.c_bool, _ptr, ctypes.c_int32, _Embd)
_ext_set_output = _function("llama_batch_ext_set_output_logits", ctypes.c_bool, _ptr, ctypes.c_int32, ctypes.c_bool)
_ENCODE, _DECODE = 0, 1
_set_offset = _function("_Z28llama_set_nextn_layer_offsetP13llama_contexti", None, _ptr, ctypes.c_int32)
_MTP = 1  # a context that runs the MTP layer


def _model(path, gpu=False):
    params = L.llama_model_default_params()
    params.n_gpu_layers, params.load_mtp = 999 if gpu else 0, True
    overrides = stacks_as_they_are()  # of the CPU
    if not gpu:
        params.tensor_buft_overrides = int(ffi.cast("uintptr_t", overrides))
    model = L.llama_model_load_from_file(str(path).encode(), params)
    assert model, path
    return model


class Watched:
    """The inputs of layers, F32 [T, n_embd] by layer, as llama.cpp's scheduler computes them. Node by node: the bits are the same."""

    def __init__(self, layers):
        self.rows, self._names = {}, {f"l_out-{v - 1}" if v else "embd": v for v in layers}
        self._names |= {f"attn_norm_in-{v}": v for v in layers} | (
            {"model.embed_tokens": 0} if 0 in layers else {}
        )  # step35's, kimi-linear's
        self.callback = L.ggml_backend_sched_eval_callback(self._see)  # the context keeps the pointer only

    def _see(self, tensor, ask, _):
        t = ffi.cast("struct ggml_tensor *", tensor)
        layer = self._names.get(ffi.string(lib.ggml_get_name(t)).decode())
        if layer is not None and not ask:
            self.rows[layer] = np.empty((t.ne[1], t.ne[0]), np.float32)
            lib.ggml_backend_tensor_get(t, ffi.from_buffer(self.rows[layer]), 0, self.rows[layer].nbytes)
        return layer is not None or not ask


def _context(model, n_ctx, n_ubatch, threads, kv, n_rs=0, other=None, kind=0, watched=None):
    p = L.llama_context_default_params()
    p.n_ctx, p.n_batch, p.n_ubatch = n_ctx, n_ubatch, n_ubatch
    p.n_threads = p.n_threads_batch = threads
    p.flash_attn_type = L.LLAMA_FLASH_ATTN_TYPE_ENABLED
    p.n_rs_seq, p.ctx_type = n_rs, kind
    p.type_k, p.type_v = kv.ids
    if other is not None:
        p.ctx_other = other
    if watched is not None:
        p.cb_eval = watched.callback
    ctx = L.llama_init_from_model(model, p)
    assert ctx
    return ctx


def _decode(ctx, batch, tokens, first, n_vocab):
    """Logits of all rows, F32 [T, n_vocab]."""
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, first + i, 1
        batch.seq_id[i][0], batch.logits[i] = 0, 1
    assert L.llama_decode(ctx, batch) == 0
    return np.stack([np.ctypeslib.as_array(L.llama_get_logits_ith(ctx, i), (n_vocab,)).copy() for i in range(len(tokens))])


def _state(ctx):
    data = (ctypes.c_uint8 * L.llama_state_seq_get_size(ctx, 0))()
    assert L.llama_state_seq_get_data(ctx, data, len(data), 0) == len(data)
    return data


def _put_back(ctx, data):
    assert L.llama_state_seq_set_data(ctx, data, len(data), 0) == len(data)


NEAR_TIE = 0.01  # logits of random models have a standard deviation of 1


class _Pair:
    """What the three have in common: they own models, contexts and batches."""

    def _rows(self, tokens, hidden, first, last=False):
        _ext_clear(self.pairs)
        hidden = np.ascontiguousarray(hidden, np.float32)
        for i, token in enumerate(tokens):
            assert _ext_add_token(self.pairs, 0, int(token)) == i
            row = _Embd(hidden[i].ctypes.data_as(ctypes.POINTER(ctypes.c_float)), 1, self.n_embd)
            assert _ext_set_embd(self.pairs, i, row)
            pos = (ctypes.c_int32 * 4)(first + i, first + i, first + i, 0)
            assert _ext_set_pos(self.pairs, i, pos) and _ext_set_output(self.pairs, i, last and i == len(tokens) - 1)
        assert _process(self.dft, _DECODE, self.pairs) == 0

    each = 1  # positions of each row; 0 within a picture by axis
    rounded = False  # whether rows that were decoded again gave other bits than in their block: ggml's AMX kernels do, 1e-6 at Q4_K

    def _keep(self, rows, logits, accepted, before):
        """How many drafts of the verified ``rows`` stay: ``accepted``, or those that are right. The target's memory ends after them: where llama.cpp
        cannot roll it back, the state ``before`` is put back, and the rows that stay are decoded again."""
        matched, first, ids = 0, self.n, logits.argmax(axis=1)
        while matched < len(rows) - 1 and ids[matched] == rows[matched + 1]:
            matched += 1
        matched = matched if accepted is None else accepted
        self.n += matched + 1
        if not L.llama_memory_seq_rm(L.llama_get_memory(self.tgt), 0, self.n, -1):
            assert before is not None
            _put_back(self.tgt, before)
            again = _decode(self.tgt, self.batch, rows[: matched + 1], first, self.n_vocab)
            self.rounded |= not np.array_equal(again, logits[: matched + 1])
        return matched

    def prefill(self, tokens):
        for first in range(0, len(tokens), self.n_ubatch):
            logits, hidden = self._target(tokens[first : first + self.n_ubatch], first)
            self.boundary = hidden[-1]
        self.n, self.pending = len(tokens), int(logits[-1].argmax())
        return self.pending

    def _chain(self, width, position):
        """The drafts of a block of ``width`` rows, the pending token included, each of the one before; ``position(i)``: of the i-th."""
        token, hidden, out = self.pending, self.boundary, []
        for i in range(width - 1):
            self._rows([token], hidden[None], position(i), last=True)
            token = int(np.ctypeslib.as_array(L.llama_get_logits_ith(self.dft, 0), (self.n_vocab,)).argmax())
            hidden = np.ctypeslib.as_array(X.llama_get_embeddings_nextn_ith(self.dft, 0), (self.n_embd,)).copy()
            out.append(token)
        return out

    def verify(self, drafts, accepted=None):
        """Target ids of all rows; keeps ``accepted`` drafts, or those that are right. Returns (ids, matched)."""
        rows, before = [self.pending, *drafts], _state(self.tgt)
        logits, hidden = self._target(rows, self.n)
        ids, matched = logits.argmax(axis=1), self._keep(rows, logits, accepted, before)
        self.boundary, self.pending = hidden[matched], int(ids[matched])
        return ids, matched

    def _hand_over(self, features, first, add):
        """Puts rows of the target's layers F32 [T, layers * n_embd] into the drafter's batch, from position ``first`` on."""
        _ext_clear(self.pairs)
        for i, values in enumerate(features):
            row = _Embd(values.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), 1, features.shape[1])
            assert _ext_add_embd(self.pairs, 0, row) == i
            at = first + i * self.each
            pos = (ctypes.c_int32 * 4)(at, at, at, 0)
            assert _ext_set_pos(self.pairs, i, pos) and (add == _DECODE or _ext_set_output(self.pairs, i, True))
        assert _process(self.dft, add, self.pairs) == 0

    def close(self):
        L.llama_batch_free(self.batch)
        _ext_free(self.pairs)
        L.llama_free(self.dft)
        L.llama_free(self.tgt)
        for model in self.models:
            L.llama_model_free(model)


class LlamaDFlash(_Pair):
    """A target and a drafter in llama.cpp, one sequence, greedy. Owns models and contexts."""

    def __init__(
        self, target, draft, target_layers, mask_token, n_ctx=1024, n_ubatch=512, threads=1, block=16, kv=F16, draft_kv=F16, causal=False,
        top_k=0, from_anchor=False, confident=False
    ):  # fmt: skip
        """``confident``: a DSpark that says what its drafts are worth, see ``said``. ``top_k``: candidates of a DFlash2's selector; ``from_anchor``: a DSpark whose pending token's row drafts too."""
        self.layers, self.mask, self.block, self.top_k, self.from_anchor = target_layers, mask_token, block, top_k, from_anchor
        self.n_ubatch = n_ubatch
        self.models = [_model(target), _model(draft)]
        with GGUFFile(target) as file:
            self.watched = Watched(target_layers) if file.get("general.architecture", str) not in HANDED_OUT else None
        self.tgt = _context(self.models[0], n_ctx, n_ubatch, threads, kv, n_rs=block - 1, watched=self.watched)
        self.dft = _context(self.models[1], n_ctx, n_ubatch, threads, draft_kv, other=self.tgt)
        self.n_embd = L.llama_model_n_embd(self.models[0])
        self.n_vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(self.models[0]))
        for layer in target_layers if self.watched is None else ():
            _set_layer_input(self.tgt, layer, True)
        _set_causal(self.dft, causal)
        if top_k or confident:
            X.llama_set_embeddings_nextn(self.dft, True, False)
        self.batch = L.llama_batch_init(n_ubatch, 0, 1)
        self.pairs = _ext_init(self.dft)
        self.n = 0

    def _capture(self, count, first):
        if self.watched is not None:
            parts = [self.watched.rows[v][:count] for v in self.layers]
        else:
            parts = [np.ctypeslib.as_array(_get_layer_input(self.tgt, v), (count, self.n_embd)) for v in self.layers]
        features = np.ascontiguousarray(np.concatenate(parts, axis=1), np.float32)
        self._hand_over(features, first, _DECODE)
        return features

    def prefill(self, tokens):
        for first in range(0, len(tokens), self.n_ubatch):
            part = tokens[first : first + self.n_ubatch]
            logits = _decode(self.tgt, self.batch, part, first, self.n_vocab)
            self._capture(len(part), first)
        self.n = len(tokens)
        self.pending = int(logits[-1].argmax())
        return self.pending

    def prefill_parts(self, parts):
        """As ``prefill``, of tokens and pictures as of ``engine.prompt``."""
        self.n = 0
        for part in parts:
            if hasattr(part, "embeddings"):
                rows = _ext_init(self.tgt)
                _decode_picture(self.tgt, rows, part, self.n)
                _ext_free(rows)
                self.each = int(part.positions is None)
                self._capture(part.rows, self.n)
                self.each, self.n = 1, self.n + part.n_pos
            else:
                logits = _decode(self.tgt, self.batch, part, self.n, self.n_vocab)
                self._capture(len(part), self.n)
                self.n += len(part)
        self.pending = int(logits[-1].argmax())
        return self.pending

    def features(self, token, position):
        """The inputs of ``target_layers`` at one token more, F32 [layers * n_embd]."""
        _decode(self.tgt, self.batch, [token], position, self.n_vocab)
        return self._capture(1, position)[0]

    def draft_logits(self, width=None):
        """Logits of the block's rows 1 .. width - 1."""
        return self._block_logits(width or self.block)[1:]

    def draft(self, width=None):
        """The drafts of a block of ``width`` rows, the pending token included."""
        width = width or self.block
        if self.from_anchor:  # one row less drafts as much
            return self._block_logits(width - 1).argmax(axis=1).tolist()
        if not self.top_k:
            return self.draft_logits(width).argmax(axis=1).tolist()
        self._block_logits(width)
        lattice = np.ctypeslib.as_array(X.llama_get_embeddings_nextn(self.dft), (width, self.n_embd))
        before, out = 0, []
        for row in lattice[1:]:
            scores = row[self.top_k : self.top_k * (self.top_k + 1)].reshape(self.top_k, self.top_k)[before]
            before = int(scores.argmax())
            out.append(int(row[before]))
        return out

    def said(self, width):
        """What a DSpark says of each of its drafts, F32 [width - 1]."""
        rows = width - self.from_anchor
        self._block_logits(rows)
        every = np.ctypeslib.as_array(X.llama_get_embeddings_nextn(self.dft), (rows, self.n_embd))
        return every[1 - self.from_anchor :, 0].copy()

    def _block_logits(self, rows):
        logits = _decode(self.dft, self.batch, [self.pending] + [self.mask] * (rows - 1), self.n, self.n_vocab)
        L.llama_memory_seq_rm(L.llama_get_memory(self.dft), 0, self.n, -1)
        return logits

    def verify(self, drafts, accepted=None):
        """Target ids of all rows; keeps ``accepted`` drafts, or those that are right, in both contexts. Returns (ids, matched).

        Where llama.cpp cannot roll recurrent states back (qwen3next) the state from before the block is put back, and the accepted rows decoded again.
        ``unsure``: of which rows its own rounding, once it was seen, may decide between the best two logits.
        """
        rows = [self.pending, *drafts]
        before = _state(self.tgt) if L.llama_model_is_hybrid(self.models[0]) else None
        logits = _decode(self.tgt, self.batch, rows, self.n, self.n_vocab)
        ids, best = logits.argmax(axis=1), np.sort(logits, axis=1)
        self.unsure = (best[:, -1] - best[:, -2] < NEAR_TIE) & self.rounded
        self._capture(len(drafts) + 1, self.n)
        matched = self._keep(rows, logits, accepted, before)
        assert L.llama_memory_seq_rm(L.llama_get_memory(self.dft), 0, self.n, -1)
        self.pending = int(ids[matched])
        return ids, matched


class LlamaMTP(_Pair):
    """A target and its MTP layer in llama.cpp, one sequence, greedy: the steps of its `draft-mtp`. Owns models and contexts.

    Each token is paired with the target's hidden state (after output_norm) of the token before it, the first one with zeros. ``draft``: the
    file of the layer, None for the target's own. ``shared``: the drafter reads the target's K/V (gemma4-assistant); there is nothing to compute
    for committed tokens then, and all drafts stand at one position. ``heads``: MTP layers, of which each drafts one token.
    """

    def __init__(self, target, draft=None, n_ctx=1024, n_ubatch=512, threads=1, width=8, kv=F16, draft_kv=F16, shared=False, heads=1):
        self.n_ubatch, self.shared, self.heads = n_ubatch, shared, heads
        self.models = [_model(target)] + ([_model(draft)] if draft is not None else [])
        self.tgt = _context(self.models[0], n_ctx, n_ubatch, threads, kv, n_rs=width - 1)
        self.dft = _context(self.models[-1], n_ctx, n_ubatch, threads, draft_kv, other=self.tgt, kind=_MTP)
        self.n_embd = L.llama_model_n_embd(self.models[0])
        self.n_vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(self.models[0]))
        X.llama_set_embeddings_nextn(self.tgt, True, False)
        X.llama_set_embeddings_nextn(self.dft, True, True)
        self.batch, self.pairs = L.llama_batch_init(n_ubatch, 0, 1), _ext_init(self.dft)
        self.n, self.boundary = 0, np.zeros(self.n_embd, np.float32)

    def _target(self, tokens, first):
        """Logits and hidden states of all rows; the layer's rows of the same tokens are computed too."""
        logits = _decode(self.tgt, self.batch, tokens, first, self.n_vocab)
        hidden = np.ctypeslib.as_array(X.llama_get_embeddings_nextn(self.tgt), (len(tokens), self.n_embd)).copy()
        for head in range(0 if self.shared else self.heads):
            self._turn_to(head, first)
            self._rows(tokens, np.concatenate([self.boundary[None], hidden[:-1]]), first)
        return logits, hidden

    def _turn_to(self, head, first):
        """The next batch is of another layer, which has K/V rows of its own from position ``first`` on."""
        if self.heads > 1:
            L.llama_memory_seq_rm(L.llama_get_memory(self.dft), 0, first, -1)
            _set_offset(self.dft, head)

    def draft(self, width):
        if self.heads > 1:
            tokens, hidden = [self.pending], [self.boundary]
            for head in range(width - 1):  # every row again, with the next layer
                self._turn_to(head, self.n)
                self._rows(tokens, np.stack(hidden), self.n, last=True)
                tokens.append(int(np.ctypeslib.as_array(L.llama_get_logits_ith(self.dft, head), (self.n_vocab,)).argmax()))
                hidden.append(np.ctypeslib.as_array(X.llama_get_embeddings_nextn_ith(self.dft, head), (self.n_embd,)).copy())
            return tokens[1:]
        out = self._chain(width, lambda i: self.n + (0 if self.shared else i))
        assert self.shared or L.llama_memory_seq_rm(L.llama_get_memory(self.dft), 0, self.n, -1)
        return out

    def verify(self, drafts, accepted=None):
        found = super().verify(drafts, accepted)
        assert self.shared or L.llama_memory_seq_rm(L.llama_get_memory(self.dft), 0, self.n, -1)
        return found


class LlamaSimple(_Pair):
    """A target and a whole small model in llama.cpp, one sequence, greedy: the steps of its `draft-simple`. Owns models and contexts.

    Every batch of the target is decoded by the small model, too; rejected rows leave both memories (recurrent states are put back, and rows that stay are
    decoded again). Those of blocks are decoded one by one: the bits of
    ggml's Q4_K products depend on the rows of a batch.
    """

    def __init__(self, target, draft, n_ctx=1024, n_ubatch=512, threads=1, width=8, kv=F16, draft_kv=F16):
        self.n_ubatch = n_ubatch
        self.models = [_model(target), _model(draft)]
        self.tgt = _context(self.models[0], n_ctx, n_ubatch, threads, kv, n_rs=width - 1)
        self.dft = _context(self.models[1], n_ctx, n_ubatch, threads, draft_kv)
        self.n_vocab, self.n_small = (L.llama_vocab_n_tokens(L.llama_model_get_vocab(model)) for model in self.models)
        self.batch, self.pairs, self.n = L.llama_batch_init(n_ubatch, 0, 1), _ext_init(self.dft), 0

    def _target(self, tokens, first, rows):
        for at in range(0, len(tokens), rows):
            _decode(self.dft, self.batch, tokens[at : at + rows], first + at, self.n_small)
        return _decode(self.tgt, self.batch, tokens, first, self.n_vocab)

    def prefill(self, tokens):
        for first in range(0, len(tokens), self.n_ubatch):
            logits = self._target(tokens[first : first + self.n_ubatch], first, self.n_ubatch)
        self.n, self.pending = len(tokens), int(logits[-1].argmax())
        return self.pending

    def draft(self, width):
        """The drafts of a block of ``width`` rows, the pending token included; the small model's memory is as before then."""
        token, out, before = self.pending, [], _state(self.dft)
        for i in range(width - 1):
            token = int(_decode(self.dft, self.batch, [token], self.n + i, self.n_small)[0].argmax())
            out.append(token)
        self._forget(before, [])
        return out

    def _forget(self, before, rows):
        """The small model's memory has the sequence, whose last ``rows`` came after ``before``."""
        if not L.llama_memory_seq_rm(L.llama_get_memory(self.dft), 0, self.n, -1):
            _put_back(self.dft, before)
            for i, token in enumerate(rows, self.n - len(rows)):
                _decode(self.dft, self.batch, [token], i, self.n_small)

    def verify(self, drafts, accepted=None):
        """Target ids of all rows; keeps ``accepted`` drafts, or those that are right. Returns (ids, matched)."""
        rows, before, small = [self.pending, *drafts], _state(self.tgt), _state(self.dft)
        logits = self._target(rows, self.n, 1)
        ids = logits.argmax(axis=1)
        matched = self._keep(rows, logits, accepted, before)
        self._forget(small, rows[: matched + 1])
        self.pending = int(ids[matched])
        return ids, matched


class LlamaEagle3(_Pair):
    """A target and its EAGLE-3 drafter in llama.cpp, one sequence, greedy: the steps of its `draft-eagle3`. Owns models and contexts.

    The row at position p is the pair (token p + 1, g_p), g_p what the encoder makes of the target's layers at p. The last pair of a batch waits
    for its token: the next batch's first one, or the one that drafting begins with.
    """

    def __init__(self, target, draft, target_layers, n_ctx=1024, n_ubatch=512, threads=1, width=8, kv=F16, draft_kv=F16):
        self.n_ubatch, self.layers = n_ubatch, target_layers
        self.models = [_model(target), _model(draft)]
        self.tgt = _context(self.models[0], n_ctx, n_ubatch, threads, kv, n_rs=width - 1)
        self.dft = _context(self.models[1], n_ctx, n_ubatch, threads, draft_kv, other=self.tgt)
        self.n_target, self.n_embd = (L.llama_model_n_embd(model) for model in self.models)
        self.n_vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(self.models[0]))
        for layer in target_layers:
            _set_layer_input(self.tgt, layer, True)
        X.llama_set_embeddings_nextn(self.dft, True, True)
        self.batch, self.pairs = L.llama_batch_init(n_ubatch, 0, 1), _ext_init(self.dft)
        self.n, self.boundary = 0, None  # g of the last row, whose pair lacks a token

    def _encoded(self, count):
        first = L.llama_memory_seq_pos_max(L.llama_get_memory(self.dft), 0) + 1  # which the encoder checks, and does not use
        parts = [np.ctypeslib.as_array(_get_layer_input(self.tgt, v), (count, self.n_target)) for v in self.layers]
        features = np.ascontiguousarray(np.concatenate(parts, axis=1), np.float32)
        self._hand_over(features, first, _ENCODE)
        return np.ctypeslib.as_array(X.llama_get_embeddings_nextn(self.dft), (count, self.n_embd)).copy()

    def _target(self, tokens, first):
        """Logits and g of all rows; the drafter's rows of the same tokens are computed too."""
        logits, g = _decode(self.tgt, self.batch, tokens, first, self.n_vocab), self._encoded(len(tokens))
        if self.boundary is not None and first > 0:
            assert L.llama_memory_seq_rm(L.llama_get_memory(self.dft), 0, first - 1, -1)
            self._rows(tokens, np.concatenate([self.boundary[None], g[:-1]]), first - 1)
        elif len(tokens) > 1:
            self._rows(tokens[1:], g[:-1], first)
        return logits, g

    def draft(self, width):
        assert L.llama_memory_seq_rm(L.llama_get_memory(self.dft), 0, self.n - 1, -1)
        return self._chain(width, lambda i: self.n - 1 + i)


def _decode_picture(ctx, batch, p, position):
    """Decodes the rows of a picture as of ``engine.prompt``, all of them in one batch, with outputs."""
    _set_causal(ctx, not p.both_ways)
    _ext_clear(batch)
    rows = np.ascontiguousarray(p.embeddings, np.float32)
    for i, values in enumerate(rows):
        row = _Embd(values.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), 1, rows.shape[1])
        assert _ext_add_embd(batch, 0, row) == i
        place = position + p.positions[:3, i] if p.positions is not None else [position + i, 0, 0]
        assert _ext_set_pos(batch, i, (ctypes.c_int32 * 4)(*map(int, place), 0)) and _ext_set_output(batch, i, True)
    assert _process(ctx, _DECODE, batch) == 0
    _set_causal(ctx, True)


def logits_with_pictures(path, parts, greedy=0, n_ctx=1024, adapter=None):
    """Logits of all rows F32 [T, n_vocab], and so many greedy tokens after them; ``parts``: tokens, and pictures as of ``engine.prompt``."""
    model = _model(path)
    ctx, batch = _context(model, n_ctx, 512, 1, F16), L.llama_batch_init(512, 0, 1)
    if adapter is not None:
        pointers = (L.llama_adapter_lora_p_ctypes * 1)(L.llama_adapter_lora_init(model, str(adapter).encode()))
        assert L.llama_set_adapters_lora(ctx, pointers, 1, (ctypes.c_float * 1)(1.0)) == 0
    pictures, out, position = _ext_init(ctx), [], 0
    n_vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(model))
    for part in parts:
        if hasattr(part, "embeddings"):
            _decode_picture(ctx, pictures, part, position)
            out += [np.ctypeslib.as_array(L.llama_get_logits_ith(ctx, i), (n_vocab,)).copy() for i in range(part.rows)]
            position += part.n_pos
        else:
            out += [*_decode(ctx, batch, part, position, n_vocab)]
            position += len(part)
    ids, logits = [], out[-1]
    for _ in range(greedy):
        ids.append(int(logits.argmax()))
        (logits,) = _decode(ctx, batch, ids[-1:], position, n_vocab)
        position += 1
    _ext_free(pictures)
    L.llama_batch_free(batch)
    L.llama_free(ctx)
    L.llama_model_free(model)
    return np.stack(out), ids
