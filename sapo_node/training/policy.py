"""The policy: a causal language model with its tokenizer, loaded from a folder, and what was found out about it.

No code from a model's folder is run and no pickle is opened: safetensors weights and architectures that transformers
knows, nothing else. Dropout stays off, in training too: the importance ratio compares the same function twice.

Before a model is used it is tried on a small input: packed and chunked log-probs against those of plain forward passes.
"""

import hashlib
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from jinja2 import TemplateError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

import sapo_node
from sapo_node.model_shape import EMBEDDED, DamagedModel, adapter_beside, read_json
from sapo_node.monitor.text import clean
from sapo_node.training import attention
from sapo_node.training.encoding import Encoder
from sapo_node.training.logprobs import log_softmax, token_logprobs
from sapo_node.training.packing import Piece, pack, pad
from sapo_node.workers import Refused

TINY_PARAMS: Final = 10_000_000
TINY_LR: Final = 3e-4
DEFAULT_LR: Final = 1e-6
LARGE_PARAMS: Final = 100_000_000
LARGE_LR: Final = 1e-5  # a full fine-tune of a large model with more than this usually ends in noise

# bfloat16 is refused where a product of matrices takes this many times as long as in float32. CPUs without instructions
# for it need 10 to 600 times as long, more the larger the matrices; those that have them at most about as long.
BFLOAT16_SLOWDOWN: Final = 5.0
SPEED_SIZE: Final = 128  # rows of the matrices that are timed: a few milliseconds where it is slow

# What is fetched of a named model: never pickles, never code.
HUB_FILES: Final = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]

# Mean and largest difference of log-probs that arithmetic in another order explains, in large models too; a wrong mask
# or position is far above. bfloat16 has 8 bits: single tokens may differ by anything, the mean may not.
TOLERANCE: Final = {torch.float64: (1e-6, 1e-6), torch.float32: (1e-4, 5e-4), torch.bfloat16: (0.1, float("inf"))}


@dataclass
class Policy:
    """A loaded model. `packed` and `split_head` say which fast paths give this architecture's exact log-probs."""

    name: str
    model: Any  # a transformers causal language model, in eval mode
    tokenizer: Any
    encoder: Encoder
    stop_ids: tuple[int, ...]
    device: torch.device
    max_length: int  # positions that the model knows
    packed: bool = True
    split_head: bool = True
    notes: list[str] = field(default_factory=list)

    @property
    def params(self) -> int:
        """Number of parameters, shared ones once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        dtype: torch.dtype = next(iter(self.model.parameters())).dtype
        return dtype

    @property
    def tokenizer_sha256(self) -> bytes:
        """32 bytes; equal for tokenizers that encode alike, wherever they were loaded from."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        text = backend.to_str() if backend else json.dumps(self.tokenizer.get_vocab(), sort_keys=True)
        return hashlib.sha256(text.encode()).digest()


def load_policy(
    name: str,
    *,
    folder: Path | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    dtype: Literal["float32", "bfloat16"] = "float32",
    system_prompt: str = "",
) -> Policy:
    """Load the model called `name`, from `folder` (a checkpoint of it) if given. Raises Refused, told for people."""
    path = folder or find_folder(name)
    check_folder(path)
    target = choose_device(device)
    transformers_logging.disable_progress_bar()
    tokenizer = _load_tokenizer(path)
    model = _load_model(path, torch.float32 if dtype == "float32" else torch.bfloat16).to(target).eval()
    policy = make_policy(name, model, tokenizer, system_prompt)
    if dtype == "bfloat16":
        policy.notes.append("bfloat16 weights round away small updates; float32 learns more at low learning rates")
    return policy


def make_policy(name: str, model: Any, tokenizer: Any, system_prompt: str = "") -> Policy:
    """A policy of a model (in eval mode) and a tokenizer that are in memory already, tried out."""
    stop_ids = _stop_ids(model, tokenizer, name)
    try:
        encoder = Encoder(tokenizer, stop_ids[0], system_prompt)
    except (ValueError, TemplateError, RecursionError) as error:
        raise Refused(f"training.model: the chat template of {name} cannot be used: {error}") from error
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise Refused(
            f"training.model: the tokenizer of {name} has {len(tokenizer)} tokens, its model only {rows}; they do not "
            "belong together"
        )
    max_length = getattr(model.config, "max_position_embeddings", None) or 1 << 30
    policy = Policy(name, model, tokenizer, encoder, stop_ids, model.device, max_length, notes=list(encoder.notes))
    try_out(policy)
    return policy


def checkpoint_layers(policy: Policy) -> None:
    """Have the model's layers computed again in the backward pass. Raises Refused for models that cannot."""
    layers = [module for module in policy.model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers or not policy.model.supports_gradient_checkpointing:
        raise Refused(
            f"training.gradient_checkpointing: {type(policy.model).__name__} does not support it; set it to false, and "
            "training.micro_batch_tokens lower to save memory"
        )
    # Nothing is random inside, so the state of random numbers need not be kept.
    policy.model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    if any(_random_itself(layer) for layer in layers):
        raise Refused(
            f"training.gradient_checkpointing: layers of {type(policy.model).__name__} would drop activations at "
            "random under it; set dropout to 0 in the model's config.json, or gradient_checkpointing to false"
        )


def _random_itself(layer: GradientCheckpointingLayer) -> bool:
    """Whether a layer drops activations by its own training mode, which checkpointing needs, not that of a module."""
    return any(isinstance(value, float) and value > 0 and "dropout" in name for name, value in vars(layer).items())


def bfloat16_slowdown(device: torch.device) -> float:
    """How many times as long a product of two matrices takes in bfloat16 as in float32; the fastest of three each."""

    def seconds(dtype: torch.dtype) -> float:
        matrix = torch.ones(SPEED_SIZE, SPEED_SIZE, dtype=dtype, device=device)
        took = []
        for _ in range(4):  # the first one warms up
            started = time.perf_counter()
            (matrix @ matrix).sum().item()  # waits for a GPU too
            took.append(time.perf_counter() - started)
        return min(took[1:])

    return seconds(torch.bfloat16) / seconds(torch.float32)


def refuse_slow_bfloat16(device: torch.device) -> None:
    """Raises Refused where the hardware emulates bfloat16, so that a step would take ten times as long, and says it."""
    slowdown = bfloat16_slowdown(device)
    if slowdown >= BFLOAT16_SLOWDOWN:
        raise Refused(
            f"training.dtype: bfloat16 takes {slowdown:.0f} times as long as float32 on this {device.type} (measured "
            "just now); set it to float32. Where memory is short, training.gradient_checkpointing and a smaller "
            "training.micro_batch_tokens save some"
        )


def public_name(name: str) -> str:
    """What others are told: of a folder its last part only, since paths are nobody's business."""
    path = Path(name).expanduser()
    return path.resolve().name if path.is_dir() else name


def default_lr(params: int) -> float:
    """Learning rate where the settings name none: tiny models bear, and need, far larger steps."""
    return TINY_LR if params <= TINY_PARAMS else DEFAULT_LR


def find_folder(name: str) -> Path:
    """The folder of an embedded model, of a path, or of a Hugging Face name (downloaded, or from its cache)."""
    if name in EMBEDDED:
        return Path(sapo_node.__file__).parent / "assets" / name
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or name.startswith((".", "~")):
        raise Refused(f"training.model: the folder {path} does not exist")
    if name.count("/") != 1:
        raise Refused(
            f"training.model: {name!r} is no embedded model ({', '.join(EMBEDDED)}), no folder here and no Hugging "
            "Face name (owner/model)"
        )
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except HFValidationError as error:
        raise Refused(f"training.model: {name!r} is neither a folder nor a Hugging Face name: {error}") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise Refused(
            f"training.model: {name!r} is no folder here, and fetching it from the Hugging Face hub failed "
            f"({type(error).__name__}). Without a network, copy the model's folder to this machine and name the folder"
        ) from error


def check_folder(path: Path) -> None:
    """Refuse, before anything is loaded, what is no causal language model in safetensors with a tokenizer."""
    if not path.is_dir():
        raise Refused(f"training.model: the folder {path} does not exist")
    if not (path / "config.json").exists():
        raise Refused(f"training.model: {path} has no config.json, so it is no Hugging Face model folder")
    try:
        config = read_json(path / "config.json")
    except DamagedModel as error:
        raise Refused(f"training.model: {error}") from error
    if adapter := adapter_beside(path):
        raise Refused(f"training.model: {adapter}")
    known = {value for value in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if isinstance(value, str)}
    kind, named = config.get("model_type"), config.get("architectures")
    first = named[0] if isinstance(named, list) and named else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(kind))
    if not isinstance(first, str) or first not in known:
        raise Refused(
            f"training.model: {path} is a {clean(str(first or kind))}, not a causal language model that transformers "
            "knows; choose one whose class ends in ForCausalLM (code inside a model's folder is never run)"
        )
    if not any((path / name).exists() for name in ("model.safetensors", "model.safetensors.index.json")):
        raise Refused(
            f"training.model: {path} has no model.safetensors; pickled weights (.bin, .pt) are not opened because "
            "they can run code. Convert them with save_pretrained in an environment you trust"
        )
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
    if not any((path / name).exists() for name in names):
        raise Refused(f"training.model: {path} has no tokenizer (tokenizer.json); copy it from the model's source")


def choose_device(device: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device meant by a setting. Raises Refused for a GPU that is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        raise Refused("training.device is cuda, but torch finds no CUDA device here; set it to cpu or auto")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def _load_tokenizer(path: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exception for a damaged file
        raise Refused(f"training.model: the tokenizer in {path} cannot be loaded: {error}") from error


def _load_model(path: Path, dtype: torch.dtype) -> Any:
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise Refused(f"training.model: {path} cannot be loaded: {error}") from error
    if report["missing_keys"]:  # transformers would fill them with noise
        missing = sorted(report["missing_keys"])
        raise Refused(f"training.model: {path} lacks {len(missing)} weights, the first is {missing[0]}")
    return model


def _stop_ids(model: Any, tokenizer: Any, name: str) -> tuple[int, ...]:
    """Tokens that end a completion; the first is the one that is put behind re-encoded ones."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    others = configured if isinstance(configured, list) else [configured]
    ids = [index for index in dict.fromkeys([tokenizer.eos_token_id, *others]) if index is not None]
    if not ids:
        raise Refused(
            f"training.model: the tokenizer of {name} has no end-of-sequence token, so no completion could end; set "
            "eos_token in its tokenizer_config.json"
        )
    return tuple(ids)


def _sliding_window(config: Any) -> int | None:
    """Tokens that some layer's attention is limited to, or None."""
    if getattr(config, "use_sliding_window", True) is False:
        return None
    return getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)


@torch.no_grad()
def try_out(policy: Policy) -> None:
    """Find the fast paths on which this model gives the log-probs of plain forward passes; note what is missing."""
    vocabulary = policy.model.get_input_embeddings().weight.shape[0]
    draw = torch.Generator().manual_seed(0)
    tokens: list[int] = torch.randint(vocabulary, (40,), generator=draw).tolist()
    pieces = [
        Piece(tokens[:7], [tokens[7:12], tokens[12:15], tokens[15:22]], [0, 1, 2]),
        Piece(tokens[22:25], [tokens[25:27], tokens[27:40]], [3, 4]),
    ]
    plain = [piece for whole in pieces for piece in singles(whole)]
    exact = torch.cat([plain_logprobs(policy, piece.prompt, piece.completions[0]) for piece in plain])

    def differs(packed: bool, split_head: bool) -> bool:
        inputs = pack(pieces, policy.device, policy.dtype) if packed else pad(plain, policy.device)
        try:
            found, _ = token_logprobs(policy.model, inputs, 1.0, split_head)
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):
            return True  # an architecture that takes no such mask, or has no such part: the other path is tried
        return not agree(found, exact, policy.dtype)

    policy.split_head = not differs(packed=False, split_head=True)
    if not policy.split_head:
        if differs(packed=False, split_head=False):
            raise Refused(f"training.model: {policy.name} gives other log-probs when it is batched; it cannot be used")
        policy.notes.append("the model changes its logits behind the output layer: all logits are held in memory")
    policy.packed = False
    if _sliding_window(policy.model.config) is None:
        own = attention.install(policy.model)
        policy.packed = not differs(packed=True, split_head=policy.split_head)
        if not policy.packed:
            policy.model.set_attn_implementation(own)
    if not policy.packed:
        policy.notes.append("the model's attention knows no groups: completions are trained on one a row, slower")


def agree(found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether two lists of log-probs differ by no more than a model of this type explains; NaN never agrees."""
    mean, largest = TOLERANCE[dtype]
    difference = (found.cpu() - exact.cpu()).abs()
    return bool(difference.mean() <= mean) and bool(difference.max() <= largest)


def singles(piece: Piece) -> list[Piece]:
    """One piece a completion."""
    return [Piece(piece.prompt, [c], [key]) for c, key in zip(piece.completions, piece.keys, strict=True)]


@torch.no_grad()
def plain_logprobs(policy: Policy, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Log-probs of one completion's tokens, unbatched and unpadded; what all else is compared with."""
    ids = torch.tensor([[*prompt, *completion]], device=policy.device)
    logits_TV = policy.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return log_softmax(logits_TV, 1.0).gather(-1, ids[0, len(prompt) :, None]).squeeze(-1)
