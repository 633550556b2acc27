"""What tests of Dynamo have in common."""

import pytest

# Dynamo looks at the gradient of every tensor and hides torch's warning; made an error, it cannot be hidden.
QUIET = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]
FRESH = [*QUIET, pytest.mark.usefixtures("fresh_dynamo")]
