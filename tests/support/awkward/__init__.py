"""Small nnx models, each awkward in its own way for whoever cuts a model into units.

All map [samples, WIDTH] to [samples, WIDTH]. None of them knows that units exist.
"""

from __future__ import annotations

from flax import nnx

from tests.support.awkward.base import Plain
from tests.support.awkward.calling import (
    CalledTwice,
    ChecksExactType,
    ChecksIsInstance,
    Closure,
    InSequential,
    KeywordArguments,
    LinenInside,
    ModuleAsArgument,
    OtherMethod,
    ReadsABlocksWeight,
    ReturnsMoreThanArrays,
    TiedWeights,
    UnlikeBlocks,
)
from tests.support.awkward.state import (
    BatchStatistics,
    Dropout,
    MakesAVariable,
    PythonCounter,
    RemembersItsOutput,
    SharedStreams,
    Sows,
    StreamsAsArgument,
)
from tests.support.awkward.transforms import OwnCond, OwnGrad, OwnJit, OwnRemat, OwnScan, OwnVmap

# Each model with the units that are to be found in it: (class, how many calls).
AWKWARD: dict[type[nnx.Module], tuple[tuple[str, int], ...]] = {
    Plain: (("Block", 3),),
    ReadsABlocksWeight: (("Block", 3),),
    ChecksIsInstance: (("Block", 3),),
    ChecksExactType: (("Block", 3),),
    KeywordArguments: (("KeywordBlock", 3),),
    ReturnsMoreThanArrays: (("DictBlock", 3),),
    BatchStatistics: (("NormBlock", 3),),
    Dropout: (("DropoutBlock", 3),),
    SharedStreams: (("NoisyBlock", 3),),
    StreamsAsArgument: (("StreamsArgumentBlock", 3),),
    TiedWeights: (("Block", 3),),
    CalledTwice: (("NormBlock", 6),),
    UnlikeBlocks: (("Block", 1), ("NormBlock", 1), ("DropoutBlock", 1), ("DoublingBlock", 1)),
    LinenInside: (("ToNNX", 3),),
    Sows: (("SowingBlock", 3),),
    MakesAVariable: (("LazyBlock", 3),),
    PythonCounter: (("CountingBlock", 6),),
    RemembersItsOutput: (("RememberingBlock", 3),),
    Closure: (("ClosureBlock", 3),),
    OtherMethod: (("EncodingBlock", 3),),
    ModuleAsArgument: (("ModuleArgumentBlock", 3),),
    OwnRemat: (("DropoutBlock", 3),),
    OwnJit: (("DropoutBlock", 3),),
    OwnScan: (("DropoutBlock", 3),),
    OwnVmap: (("Block", 3),),
    OwnGrad: (("Block", 6),),
    InSequential: (("Block", 2), ("Linear", 2)),
    OwnCond: (("Block", 3),),
}
