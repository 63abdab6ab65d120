"""What the shop knows: the orders as they came in, and what their jobs wrote."""

from __future__ import annotations

from django.db import models

CELL = 250
"""Most characters of a cell."""


class Batch(models.Model):
    """One imported file."""

    code = models.CharField(max_length=8, unique=True)
    source = models.CharField(max_length=255, help_text="Name of the file.")
    started_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        verbose_name_plural = "batches"
        ordering = ("-id",)

    def __str__(self) -> str:
        return f"{self.code} ({self.source})"

    def reference(self, row_number: int) -> str:
        """Name a row of this batch; references sort as their rows do."""
        return f"{self.code}-{row_number:09d}"


class Order(models.Model):
    """One order line: a row of the file, every cell the text that stood there.

    A row with a missing customer or a price of zero is an order too. It is for the jobs to read the
    text and to refuse what they cannot use (see ``reading``); saving never loses a row.
    """

    batch = models.ForeignKey(Batch, on_delete=models.CASCADE, related_name="orders")
    reference = models.CharField(max_length=18, unique=True)
    row_number = models.PositiveIntegerField()
    invoice_number = models.CharField(max_length=CELL, blank=True)
    stock_code = models.CharField(max_length=CELL, blank=True)
    description = models.CharField(max_length=CELL, blank=True)
    quantity = models.CharField(max_length=CELL, blank=True)
    invoiced_at = models.CharField(max_length=CELL, blank=True)
    unit_price = models.CharField(max_length=CELL, blank=True)
    customer_id = models.CharField(max_length=CELL, blank=True)
    country = models.CharField(max_length=CELL, blank=True)

    class Meta:
        ordering = ("-id",)

    def __str__(self) -> str:
        return f"{self.reference} (invoice {self.invoice_number})"


class StockMovement(models.Model):
    """What an order took from the stock of a product, or gave back."""

    order = models.OneToOneField(Order, on_delete=models.CASCADE, related_name="stock_movement")
    stock_code = models.CharField(max_length=CELL)
    change = models.IntegerField(help_text="Units; negative: taken from stock.")
    moved_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("-id",)

    def __str__(self) -> str:
        return f"{self.change:+} {self.stock_code}"


class Invoice(models.Model):
    """An invoice of a batch; the same file imported twice makes its invoices twice."""

    batch = models.ForeignKey(Batch, on_delete=models.CASCADE, related_name="invoices")
    number = models.CharField(max_length=CELL)
    customer = models.CharField(max_length=CELL)
    invoiced_at = models.DateTimeField()
    total = models.DecimalField(max_digits=18, decimal_places=2, default=0, help_text="Sterling.")

    class Meta:
        ordering = ("-id",)
        constraints = (
            models.UniqueConstraint(fields=("batch", "number"), name="shop_invoice_number"),
        )

    def __str__(self) -> str:
        return self.number


class InvoiceLine(models.Model):
    """What an order costs."""

    invoice = models.ForeignKey(Invoice, on_delete=models.CASCADE, related_name="lines")
    order = models.OneToOneField(Order, on_delete=models.CASCADE, related_name="invoice_line")
    units = models.PositiveIntegerField()
    unit_price = models.DecimalField(max_digits=13, decimal_places=4)
    amount = models.DecimalField(max_digits=18, decimal_places=2)

    class Meta:
        ordering = ("id",)

    def __str__(self) -> str:
        return f"{self.invoice_id}: {self.amount}"


class DayReport(models.Model):
    """What the orders of a batch are worth in euros; see ``reports``."""

    batch = models.OneToOneField(Batch, on_delete=models.CASCADE, related_name="report")
    order_count = models.PositiveIntegerField()
    total = models.DecimalField(max_digits=18, decimal_places=2, help_text="Euros.")
    by_country = models.JSONField(help_text="Euros by country.")
    written_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("-id",)

    def __str__(self) -> str:
        return f"{self.batch}: {self.total} EUR"
