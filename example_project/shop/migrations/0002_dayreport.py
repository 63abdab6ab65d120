import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("shop", "0001_initial")]

    operations = [
        migrations.CreateModel(
            name="DayReport",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("order_count", models.PositiveIntegerField()),
                (
                    "total",
                    models.DecimalField(decimal_places=2, help_text="Euros.", max_digits=18),
                ),
                ("by_country", models.JSONField(help_text="Euros by country.")),
                ("written_at", models.DateTimeField(auto_now_add=True)),
                (
                    "batch",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="report",
                        to="shop.batch",
                    ),
                ),
            ],
            options={"ordering": ("-id",)},
        ),
    ]
