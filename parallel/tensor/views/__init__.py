class Index:
    @classmethod
    def of(cls, rows, size):
        return None


class View:
    pass


class Views:
    def __init__(self, axis, sequence=False):
        self.axis = axis
        self.gathers = []
        self.partial = set()

    def clear(self):
        pass


def show(*a):
    raise NotImplementedError("views")
