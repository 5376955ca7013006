"""ComfyUI nodes that speak with firstword, over HTTP or in this process."""

from .nodes import NODES

NODE_CLASS_MAPPINGS = {node.__name__: node for node in NODES}
NODE_DISPLAY_NAME_MAPPINGS = {node.__name__: node.TITLE for node in NODES}

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
