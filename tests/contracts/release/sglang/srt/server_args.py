import dataclasses


@dataclasses.dataclass
class ServerArgs:
    model_path: str
    device: str = "cuda"
