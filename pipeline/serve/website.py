"""Pages that a model writes, beside its answers on the page of `earlyfusion serve`.

    POST /page        {"text": answer} -> {"address", "repairs", "picture"}
    GET  /page/{id}   the document, which may run nothing and fetch nothing

The document is shown in a frame without any right. Where there is a browser, `picture` is how it looks there,
as a data URL: to be compared with what was shown, and to be shown to the model for a revision.
"""

import secrets
from collections import OrderedDict

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from earlyfusion.data.errors import BadSample
from earlyfusion.data.tasks.pages import document_of
from earlyfusion.eval.website.browser import MOST_HTML, PageError, Renderer
from earlyfusion.kernels.errors import UserError, one_line
from earlyfusion.kernels.files import Record
from earlyfusion.pipeline.report.page import data_uri
from earlyfusion.pipeline.serve.protocol import Refused, read

KEPT = 64
"""Documents that can still be opened."""
HEADERS = {
    "Content-Security-Policy": "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:;"
    " font-src data:; frame-ancestors 'self'; form-action 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class PageRequest(BaseModel):
    text: str = Field(max_length=MOST_HTML)
    """an answer: a page in the compact language, or HTML"""


class Website:
    """The routes, and the pages that were written last."""

    def __init__(self) -> None:
        self.documents: OrderedDict[str, str] = OrderedDict()
        self.renderer: Renderer | None = None
        self.unseen = ""
        try:
            self.renderer = Renderer(workers=2)
        except UserError as error:
            self.unseen = str(error)

    @property
    def routes(self) -> list[Route]:
        """For an application."""
        return [Route("/page", self.make, methods=["POST"]), Route("/page/{number}", self.show)]

    async def make(self, http: Request) -> Response:
        """A page of an answer. Raises Refused for what is none."""
        body = read(PageRequest, http.state.incoming.taken())
        try:
            document, repairs = document_of(body.text)
        except BadSample as error:
            raise Refused(str(error), param="text") from None
        number = secrets.token_hex(8)
        self.documents[number] = document
        while len(self.documents) > KEPT:
            self.documents.popitem(last=False)

        found: Record = {
            "address": f"/page/{number}",
            "repairs": repairs,
            "picture": None,
            "note": self.unseen,
        }
        if self.renderer is not None:
            try:
                picture = (await self.renderer.render(document)).picture
                found["picture"] = picture and data_uri(picture)
            except PageError as error:
                found["note"] = one_line(error)
        return JSONResponse(found)

    async def show(self, http: Request) -> Response:
        """A document; 404 for one that is not kept any more."""
        document = self.documents.get(http.path_params["number"])
        if document is None:
            raise Refused("no such page, or one too old; write it again", status=404)
        return HTMLResponse(document, headers=HEADERS)
