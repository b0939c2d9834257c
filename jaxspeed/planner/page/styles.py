"""CSS classes of memory components, mesh axes and parts of the step time, for the entire page.

State is drawn plain, temporaries striped. The colours of page.css differ for the colour-blind too,
and each part has a number.
"""

COMPONENTS = {
    "parameters": "c1",
    "masters": "c2",
    "optimizer": "c3",
    "average": "c4",
    "gradients": "c5",
    "saved activations": "c6",
    "working set": "c7",
    "logits": "c8",
    "gathered weights": "c9",
    "offload buffers": "c10",
    "copies of state": "c11",
}
OTHER = "c12"

AXES = {"pipe": "a1", "replica": "a2", "data": "a3", "seq": "a4", "expert": "a5", "tensor": "a6"}

TIME = {
    "compute": "t1",
    "memory": "t2",
    "links": "t3",
    "network": "t4",
    "host": "t5",
    "bubble": "t6",
}


def component(name: str, lasting: bool) -> str:
    return f"{COMPONENTS.get(name, OTHER)}{'' if lasting else ' striped'}"
