"""Weights from the trainer to whoever reads them, through directories that appear whole or not at all."""

from agentrl.sync.disk import Manifest, publish, read_manifest, verify_directory
from agentrl.sync.tensors import RawTensor, read_safetensors, write_safetensors

__all__ = ["Manifest", "RawTensor", "publish", "read_manifest", "read_safetensors", "verify_directory", "write_safetensors"]
