"""The plain Flower ClientApp: hand each message to the handler of its job."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from client_app.handler import handle_admit, handle_evaluate, handle_hello, handle_train

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    return handle_train(message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    return handle_evaluate(message, context)


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    return handle_hello(message, context)


@app.query("admit")
def admit(message: Message, context: Context) -> Message:
    return handle_admit(message, context)
