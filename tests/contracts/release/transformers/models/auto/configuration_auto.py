class _Mapping:
    def register(self, key, value, exist_ok=False):
        pass


CONFIG_MAPPING = _Mapping()
