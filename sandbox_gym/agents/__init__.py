"""Tools for language models, each bound to one sandbox: for the OpenAI Agents SDK, for plain function calling, and over
MCP (`sandbox-gym mcp`).
"""

from sandbox_gym.agents.calling import call_tool, function_tools
from sandbox_gym.agents.sdk import sandbox_tools

__all__ = ["call_tool", "function_tools", "sandbox_tools"]
