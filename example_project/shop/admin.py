"""The shop's tables in the admin, to look up what a job was about."""

from __future__ import annotations

from django.contrib import admin

from example_project.shop.models import Batch, DayReport, Invoice, InvoiceLine, Order, StockMovement


class Listing(admin.ModelAdmin):
    """A list that stays fast on many rows: nothing is counted twice."""

    show_full_result_count = False
    list_per_page = 50


@admin.register(Batch)
class BatchAdmin(Listing):
    """Imported files."""

    list_display = ("code", "source", "started_at")


@admin.register(Order)
class OrderAdmin(Listing):
    """Order lines; correct a cell here, then replay the dead letter."""

    list_display = ("reference", "invoice_number", "stock_code", "quantity", "unit_price")
    list_filter = ("batch",)
    search_fields = ("=reference", "=invoice_number")
    raw_id_fields = ("batch",)


@admin.register(StockMovement)
class StockMovementAdmin(Listing):
    """What the stock jobs wrote."""

    list_display = ("stock_code", "change", "order", "moved_at")
    list_select_related = ("order",)
    search_fields = ("=stock_code",)
    raw_id_fields = ("order",)


class InvoiceLineInline(admin.TabularInline):
    """The lines of an invoice."""

    model = InvoiceLine
    raw_id_fields = ("order",)
    extra = 0


@admin.register(Invoice)
class InvoiceAdmin(Listing):
    """What the invoice jobs wrote."""

    list_display = ("number", "customer", "total", "invoiced_at")
    search_fields = ("=number", "=customer")
    raw_id_fields = ("batch",)
    inlines = (InvoiceLineInline,)


@admin.register(DayReport)
class DayReportAdmin(Listing):
    """What the workflow of the day's report wrote."""

    list_display = ("batch", "order_count", "total", "written_at")
    list_select_related = ("batch",)
