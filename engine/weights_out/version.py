"""Messages of published weights: geometry of the model, numbers of versions, requests for hashes and blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.checkpoint.format.pieces import Part, Piece, Runs, runs
from engine.checkpoint.format.safetensors_file import FilePart, TensorKind, file_parts

GEOMETRY, NEWEST, OPEN, CLOSE = "/v1/weights/geometry", "/v1/weights/newest", "/v1/weights/open", "/v1/weights/close"
HASHES, BLOCKS = "/v1/weights/hashes", "/v1/weights/blocks"
GONE, NOT_YET, EARLY = 410, 503, 425
"""Status of a reply about a version that has ended, one that is not complete on a rank, and one that another receiver
has not received yet."""
TOKEN_VARIABLE = "TRINE_WEIGHTS_TOKEN"
"""Environment variable with the token that a trainer and its receivers share."""


@dataclass(frozen=True, slots=True)
class PublishedTensor:
    """Description of one tensor of the published model, such as its dtype, shape, and aliases (keys of tied weights).

    Mappings such as ``Geometry.tensors`` have it under the tensor's key in the model's ``state_dict()``.
    """

    dtype: str
    """Dtype as safetensors names it, such as "BF16"."""
    shape: tuple[int, ...]
    served: bool
    """False for a frozen tensor that is not published; receivers hold it."""
    aliases: tuple[str, ...]
    """Further keys of the same tensor (tied weights)."""
    parts: tuple[FilePart, ...] = ()
    """Tensors of a published folder that have its elements, such as single experts; empty: one, under its key."""

    @property
    def kind(self) -> TensorKind:
        """Dtype and full shape."""
        return TensorKind(self.dtype, self.shape)

    def entries(self, key: str) -> Sequence[FilePart]:
        """Returns the parts of this tensor that are tensors in a Hugging Face checkpoint, such as one for each expert.

        Args:
            key: key of this tensor in the model's state dict.
        """
        return file_parts(key, self.shape, self.parts)


@dataclass(frozen=True, slots=True)
class WantedPiece:
    """Elements of one tensor that a receiver reads from one source.

    They are the elements of ``piece`` that every piece in ``inside`` has, and no piece in ``outside`` has.
    """

    name: str
    piece: Piece
    """Piece of the receiver, by which it counts elements."""
    inside: tuple[Piece, ...] = ()
    """Pieces that contain the elements, too, such as the one of their source."""
    outside: tuple[Piece, ...] = ()
    """Pieces that contain none of them, because other sources have these."""

    def overlap(self, owned: Piece) -> Runs:
        """Returns the wanted elements inside the piece ``owned``, as ranges in the order of the full tensor.

        Each range has an offset in ``owned``, an offset in the wanted ``piece``, and a length.
        """
        return runs(owned, self.piece, self.inside, self.outside)


@dataclass(frozen=True, slots=True)
class OwnerRank:
    """Address of a rank or receiver that serves weights, and the elements that it serves, by tensor key.

    In a ``Geometry``, all owners are ranks, and no two owners have an element in common.
    """

    url: str
    pieces: Mapping[str, Piece]
    copies: tuple[str, ...] = ()
    """Addresses of further ranks that serve the same elements."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Facts about a run that are equal for all its versions: all tensors, and the ranks that serve them."""

    run: str
    """Random name of the run; a trainer that starts again has another one."""
    architecture: str
    """Class of the model, such as "Qwen3ForCausalLM"."""
    files: Mapping[str, str]
    """Text of "config.json" and other files of a Hugging Face model, by name."""
    tensors: Mapping[str, PublishedTensor]
    owners: tuple[OwnerRank, ...]
    deadline: float
    """Seconds after which the trainer drops a version that a receiver still reads."""

    @property
    def served(self) -> dict[str, PublishedTensor]:
        """Descriptions of the published tensors, by key."""
        return {key: tensor for key, tensor in self.tensors.items() if tensor.served}

    def whole(self, key: str) -> WantedPiece:
        """Returns all elements of tensor ``key`` as a wanted piece."""
        return WantedPiece(key, Part(self.tensors[key].shape).whole())


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """Identity of one published version of the weights: run, number, and the update after which it was made."""

    run: str
    number: int
    base: int | None
    """Number of the version before it; None for the first one of a run."""
    step: int
    """Weight updates that it contains."""

    @property
    def name(self) -> str:
        """Name of the version, unique over all runs: the run's random name and the version's number."""
        return f"{self.run}-{self.number:06d}"


@dataclass(frozen=True, slots=True)
class NewestReply:
    """Reply with the newest version; its field is None before the first version is published."""

    version: WeightVersion | None


@dataclass(frozen=True, slots=True)
class LeaseCall:
    """Request that begins or ends a receiver's reading of a version.

    Until the reading ends, but at most for ``seconds``, the training does not replace the version.
    """

    run: str
    number: int
    reader: str
    seconds: float
    peer: OwnerRank | None = None
    """Elements that the reader serves to later readers; None: it serves none."""
    whole: bool = False
    """True at the end if the reader has all of the version."""


@dataclass(frozen=True, slots=True)
class LeaseReply:
    """Reply with at most 16 receivers that began to read the version before this receiver, the earliest first.

    They serve the parts of the version that they have received.
    """

    peers: tuple[OwnerRank, ...]


@dataclass(frozen=True, slots=True)
class HashesCall:
    """Request to one rank or receiver for the hashes of its blocks (256 KiB of a tensor) in the pieces ``wanted``."""

    run: str
    """Run of the version: a trainer that has started again must not complete a version of the one before it."""
    number: int
    owner: int
    """Number of the owner in the geometry; 0 for another receiver."""
    wanted: tuple[WantedPiece, ...]
    hashed: bool = True
    """False: the reply has no hashes, because the reader has them from the owner."""


@dataclass(frozen=True, slots=True)
class HashesReply:
    """Reply with the xxh3-64 hashes of the blocks (256 KiB) of each requested piece that the rank serves.

    The hashes of a piece form one text: 16 hexadecimal digits for each hash, lowest byte first.
    """

    layout: str
    """Name of the wanted pieces in ``BlocksCall``."""
    hashes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BlocksCall:
    """Request for the bytes of blocks of 256 KiB, in the order of ``blocks``.

    An entry is (flow, first block, block after the last). ``flow`` is an index into the pieces of the ``HashesCall``
    that have elements on the serving rank.
    """

    number: int
    owner: int
    layout: str
    blocks: tuple[tuple[int, int, int], ...]
