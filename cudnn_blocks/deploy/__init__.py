# SPDX-License-Identifier: Apache-2.0
"""Deploy files: configurations of ops and blocks as data, to probe, compile and bundle."""

from cudnn_blocks.deploy.deploy_file import DeployFile, deploy_schema, read_deploy_file
from cudnn_blocks.deploy.request import Request
from cudnn_blocks.deploy.requests import REQUESTS

__all__ = ["REQUESTS", "DeployFile", "Request", "deploy_schema", "read_deploy_file"]
