"""Measuring: speed, memory, quality, extrapolation, and what a model is made of. Every measurement is one record."""

from hybridtf.bench.arms import Foreign
from hybridtf.bench.cells import Cell, Engine, Failure
from hybridtf.bench.claims import ClaimError, long_context_claim
from hybridtf.bench.comparison import compare
from hybridtf.bench.describe import measure_model
from hybridtf.bench.differences import Difference, pairwise
from hybridtf.bench.environment import environment
from hybridtf.bench.extrapolation import measure_extrapolation
from hybridtf.bench.fits import measure_fits, search_fits
from hybridtf.bench.kernel_speed import measure_kernels
from hybridtf.bench.memory import count_bytes, measure_memory
from hybridtf.bench.options import CompareOptions
from hybridtf.bench.pareto import ParetoAxis, ParetoPoint, pareto_axes, pareto_front
from hybridtf.bench.pool import LocalPool
from hybridtf.bench.quality import measure_quality
from hybridtf.bench.records import KINDS, SCHEMA, Record, Records, append_record, make_record, read_records, select
from hybridtf.bench.speed import measure_speed
from hybridtf.bench.subject import Identity, ModelFactory, Subject, recipe_hash
from hybridtf.bench.timing import machine_floor

__all__ = [
    "KINDS", "SCHEMA", "Cell", "ClaimError", "CompareOptions", "Difference", "Engine", "Failure", "Foreign", "Identity",
    "LocalPool", "ModelFactory", "ParetoAxis", "ParetoPoint", "Record", "Records", "Subject", "append_record", "compare",
    "count_bytes", "environment", "long_context_claim", "machine_floor", "make_record", "measure_extrapolation",
    "measure_fits", "measure_kernels", "measure_memory", "measure_model", "measure_quality", "measure_speed", "pairwise",
    "pareto_axes", "pareto_front", "read_records", "recipe_hash", "search_fits", "select",
]
