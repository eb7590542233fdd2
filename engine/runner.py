"""Loads a model and runs its forward steps.

Life cycle: :meth:`ModelRunner.load`, :meth:`ModelRunner.warm_up` once, :meth:`ModelRunner.execute` per step, and at the
end maybe :meth:`ModelRunner.adapted`, which hands its weights on. Blocking, and for one thread at a time; which blocks
a chunk may name is the caller's business.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import torch

from engine.attention import create_backend
from engine.attention.backend import AttentionBackend
from engine.batch import BatchLimits, Chunk, Draw, flatten
from engine.checkpoint import Progress, load_weights, silent
from engine.config import EngineConfig
from engine.copy_queue import CopyQueue, copy_queue
from engine.decode_graphs import DecodeGraphs
from engine.grammar import Grammars
from engine.graph_batches import default_batches
from engine.host_link import upload
from engine.kv_cache import TORCH_DTYPES, KVCache
from engine.layer_watch import LayerWatch
from engine.logit_rules import Row
from engine.models import family
from engine.models.config import ModelConfig
from engine.models.model import Model, OnLayer
from engine.models.tying import as_stored
from engine.native.library import kernels_for
from engine.prompt_logprobs import tell
from engine.recorder import CudaRecorder, Recorder
from engine.resolution import (
    pool_blocks,
    resolve_device,
    resolve_dtype,
    resolve_layout,
    resolve_max_model_len,
)
from engine.sampler import sample
from engine.tape_recorder import TapeRecorder
from protocol.errors import EngineFailure
from protocol.layout import PADDING_BLOCK
from protocol.sampling import SamplingParams

SHORT_CHUNK = 64
"""Tokens that show a CPU all it needs: two rows of tiles."""


class ModelRunner:
    """A loaded model and its KV cache.

    Attributes:
        config: settings.
        model_config: geometry of the model.
        layout: geometry of the cache.
        num_blocks: blocks of the cache, block 0 included.
        cache: K and V.
        vocab_size: token ids lie below this.
        max_model_len: prompt plus output tokens of one sequence at most.
        device: where model and cache are.
        copies: orders copies out of and into the cache after the steps.
        grammars: of the requests.
    """

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, model: Model, backend: AttentionBackend, cache: KVCache
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.layout = cache.layout
        self.num_blocks = cache.num_blocks
        self.cache = cache
        self.vocab_size = model_config.vocab_size
        self.max_model_len = resolve_max_model_len(config, model_config, cache.num_blocks)
        self.device = backend.device
        self.copies: CopyQueue = copy_queue(backend.device)
        self.grammars = Grammars(Path(config.model), model_config.vocab_size)
        self._model = model
        self._backend = backend
        self._graphs: DecodeGraphs | None = None
        self._warm = False
        self._limits = BatchLimits(
            block_size=self.layout.block_size,
            num_blocks=self.num_blocks,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
        )

    @classmethod
    def load(cls, config: EngineConfig, progress: Progress | None = None) -> ModelRunner:
        """Read the checkpoint and allocate the cache; sets torch's thread count where ``config`` names one.

        Args:
            config: settings.
            progress: told of each stage, and of the weights how far they are.

        Raises:
            ConfigError: a setting does not fit the model or the device.
            ModelError: the checkpoint cannot be served.
            EngineFailure: torch raised, mostly for want of memory.
        """
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        directory = Path(config.model)
        model_config = as_stored(ModelConfig.read(directory), directory)
        build = family(model_config.architecture)
        # Only the pool's memory can still lower it, and that is measured when the weights are there.
        blocks = config.num_blocks if config.pool_memory is None else None
        max_model_len = resolve_max_model_len(config, model_config, blocks)
        device = resolve_device(config.device)
        dtype = resolve_dtype(config, device)
        layout = resolve_layout(config, model_config, dtype)
        report = progress or silent
        report("kernels", 0.0)
        backend = create_backend(config.attention, layout, device, TORCH_DTYPES[dtype])
        report("weights", 0.0)
        with _mapped(f"loading {directory}"):
            model = build(model_config, max_model_len=max_model_len, dtype=TORCH_DTYPES[dtype], device=device)
            load_weights(directory, model.destinations(), ignored=model.ignores, progress=report)
            report("packing", 0.0)
            model.seal()
            report("pool", 0.0)
            num_blocks = pool_blocks(config, layout, device)
            resolve_max_model_len(config, model_config, num_blocks)
            cache = KVCache(layout, num_blocks, device)
        return cls(config, model_config, model, backend, cache)

    def adapted(self, config: EngineConfig, progress: Progress | None = None) -> ModelRunner | None:
        """A runner by other settings over the same weights, and over the same cache where its geometry stays.

        None where the weights have to be loaded anew. Either way this one is void, and what is not handed on is given
        back; only where no setting differs the runner is this one itself.

        Raises:
            ConfigError, EngineFailure: as :meth:`load`; nothing is handed on then.
        """
        if config == self.config:
            return self
        device = resolve_device(config.device)
        dtype = resolve_dtype(config, device)
        model, self._graphs = self._model, None
        if (config.model, device, TORCH_DTYPES[dtype]) != (self.config.model, self.device, self._backend.dtype):
            del self.cache, self._model, model
            _give_back(device)
            return None
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        report = progress or silent
        report("pool", 0.0)
        layout = resolve_layout(config, self.model_config, dtype)
        backend = create_backend(config.attention, layout, device, TORCH_DTYPES[dtype])
        with _mapped("making another pool"):
            if (layout, config.num_blocks, config.pool_memory) == (
                self.layout,
                self.config.num_blocks,
                self.config.pool_memory,
            ):
                cache = self.cache
            else:
                # The old one first: there may be no room for both.
                del self.cache
                _give_back(device)
                cache = KVCache(layout, pool_blocks(config, layout, device), device)
            model.serve(resolve_max_model_len(config, self.model_config, cache.num_blocks))
        heir = ModelRunner(config, self.model_config, model, backend, cache)
        heir.grammars = self.grammars
        return heir

    def execute(self, chunks: Sequence[Chunk], watch: LayerWatch | None = None) -> list[Draw | None]:
        """One forward step of all ``chunks``; stores their K and V, on a GPU in the order that ``copies`` keeps.

        Blocks that chunks want copied are copied first, all of them, before anything is stored.

        Args:
            chunks: the work.
            watch: called from within: what the layers that are through have stored is in memory, and no later layer
                writes there. On a GPU the step waits for the device at each call.

        Returns:
            What was drawn for each chunk, None where it wants nothing.

        Raises:
            InvariantViolation: a chunk names what is not there; nothing was stored.
            EngineFailure: torch raised, or the logits are not finite; nothing is stored any more.
        """
        draws: list[Draw | None] = [None] * len(chunks)
        rows: list[Row] = []
        source: list[int] = []
        indices: list[int] = []
        for index, chunk in enumerate(chunks):
            if chunk.sampling is not None:
                for sampling in (chunk.sampling, *chunk.forks):
                    rows.append(self._row(sampling, chunk))
                    source.append(len(indices))
                indices.append(index)
        logits = self.logits(chunks, watch)
        if rows:
            with _mapped(f"drawing {len(rows)} tokens"):
                if len(rows) > len(indices):
                    # Forks of a chunk see the same logits.
                    logits = logits[upload(source, torch.int64, self.device)]
                drawn = iter(sample(logits, rows))
            for index in indices:
                draws[index] = next(drawn)._replace(forks=tuple(islice(drawn, len(chunks[index].forks))))
        return draws

    def _row(self, sampling: SamplingParams, chunk: Chunk) -> Row:
        allowed = self.grammars.allowed(sampling, chunk.position, chunk.history)
        return Row(sampling, chunk.position, chunk.history, allowed)

    def logits(self, chunks: Sequence[Chunk], watch: LayerWatch | None = None) -> torch.Tensor:
        """The forward pass of :meth:`execute` without the draw; spans of chunks are told of.

        Returns:
            [N, vocab], after the last token of each chunk that wants a draw, in order; good until the next step.

        Raises:
            InvariantViolation: a chunk names what is not there; nothing was stored.
            EngineFailure: torch raised.
        """
        batch = flatten(chunks, self._limits)
        with _mapped(f"a step of {len(batch.token_ids)} tokens"), self._marked(), torch.inference_mode():
            if copies := [chunk.copied for chunk in chunks if chunk.copied is not None]:
                self.cache.copy_blocks(copies)
            # A span is told of from the hidden states, which a replay does not give.
            if self._graphs is not None and watch is None and all(chunk.span is None for chunk in chunks):
                replayed = self._graphs.logits(batch)
                if replayed is not None:
                    return replayed
            hidden = self._model.hidden(
                torch.from_numpy(batch.token_ids).to(self.device),
                torch.from_numpy(batch.positions).to(self.device),
                self._backend.plan(batch),
                self.cache,
                None if watch is None else self._borders(watch),
            )
            spans = [
                (int(first), chunk.span)
                for first, chunk in zip(batch.query_start_loc[:-1], chunks, strict=True)
                if chunk.span is not None
            ]
            tell(spans, hidden, self._model.logits, self.vocab_size)
            return self._model.logits(hidden[torch.from_numpy(batch.logits_indices).to(self.device)])

    @contextmanager
    def _marked(self) -> Iterator[None]:
        """Around what touches the cache: copies that follow it come after it; when it raises it is over."""
        try:
            yield
        except BaseException:
            # Whoever hears of it gives the blocks to others, which is not for a kernel to write then.
            self.copies.mark()
            self.copies.wait_for_steps()
            raise
        self.copies.mark()

    def _borders(self, watch: LayerWatch) -> OnLayer:
        last = self.layout.num_layers

        def on_layer(done: int) -> None:
            if done % watch.every and done != last:
                return
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
            watch.tell(done)

        return on_layer

    def warm_up(self, *, decodes: bool = True) -> None:
        """Run the largest prompt chunk and a full batch of decodes, in the padding block; no other block changes.

        On a CPU the chunk is a short one: what a step allocates there goes with it, and nothing is set aside that could
        be found too large. Reads the tokenizer, too, for the grammars. What has been done once is not done again.

        Args:
            decodes: whether there will be steps of decodes alone; they are captured then, where that pays.
        """
        largest = min(self.config.max_batch_tokens, self.max_model_len)
        count = min(largest, SHORT_CHUNK) if self.device.type == "cpu" else largest
        table = [PADDING_BLOCK] * self.layout.blocks_for(count)
        greedy = SamplingParams(temperature=0.0)
        if not self._warm:
            self.execute([Chunk([0] * count, 0, table, greedy)])
            self.execute([Chunk([0], 0, table, greedy)] * self.config.max_sequences)
            self.grammars.warm_up()
            self._warm = True
        if decodes and self._graphs is None and self.config.cuda_graphs == "auto" and (recorder := self._recorder()):
            self.capture_decodes(recorder)

    def _recorder(self) -> Recorder | None:
        """What records steps of decodes on this device; None where nothing would be gained."""
        if self.device.type == "cuda":
            return CudaRecorder(self.device)
        dtype = self._backend.dtype
        kernels = kernels_for(dtype, self.device)
        # Without products of our own the most of a step is torch's, which Python calls either way.
        own = kernels is not None and kernels.linear_kind > 0 and dtype == torch.bfloat16
        return TapeRecorder(kernels) if kernels is not None and own else None

    def capture_decodes(self, recorder: Recorder) -> tuple[int, ...]:
        """Have steps of decodes recorded, and replayed from now on.

        Returns:
            The sizes of batch that are; none where the model or the attention does not allow it, which is logged.
        """
        sizes = self.config.cuda_graph_batches or default_batches(
            self.config.max_sequences, recorder.most, recorder.every
        )
        width = self.layout.blocks_for(self.max_model_len)
        self._graphs = DecodeGraphs(self._model, self._backend, self.cache, recorder, sizes, width)
        with self._marked():
            self._graphs.capture()
        return self._graphs.captured


@contextmanager
def _mapped(what: str) -> Iterator[None]:
    """Turn what torch raises (a RuntimeError, out of memory included) into EngineFailure."""
    try:
        yield
    except RuntimeError as error:
        raise EngineFailure(f"{what} failed: {error}") from error


def _give_back(device: torch.device) -> None:
    """What was let go of is free to be allocated anew, though whoever had it held itself in cycles."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
